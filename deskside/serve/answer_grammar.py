"""Grammars of answers: reasoning, then calls of functions, or text, which may have a grammar of its own.

They are in Lark with llguidance's extensions (docs/syntax.md of github.com/guidance-ai/llguidance): `%json` is a JSON
schema, `<[7]>` is the token with the id 7, `@inner` is another grammar, and a `[lazy]` rule ends as soon as it can.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deskside.data.chat.answer_parser import Thinking
from deskside.data.chat.tool_formats import END_THINK, THINK, ToolFormat
from deskside.engine.grammar import INNER, lark_literal
from deskside.engine.json_schema import lark_json

ANYTHING = r"(.|\n)*"
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Calls:
    """The calls that an answer may have.

    functions: as in the tools of OpenAI's API. required: there must be a call. several: there may be more than one.
    """

    tool_format: ToolFormat
    functions: Sequence[Mapping[str, Any]]
    required: bool
    several: bool


def answer_grammar(
    thinking: Thinking, calls: Calls | None, has_inner: bool, token_id: Callable[[str], int | None]
) -> str:
    """Return the grammar of an answer in Lark.

    has_inner: whether the text of the answer has a grammar of its own, which is `@inner` in the returned one.
    token_id: returns the id of a text that is a special token, and None for others.
    """
    return _Rules(token_id).write(thinking, calls, INNER if has_inner else "TEXT")


class _Rules:
    """The rules of a grammar, by their names."""

    def __init__(self, token_id: Callable[[str], int | None]):
        self._token_id = token_id
        self._rules = {"TEXT": f"/{ANYTHING}/", "SPACE": r"/[ \n]{1,4}/"}

    def write(self, thinking: Thinking, calls: Calls | None, text: str) -> str:
        """Return the grammar. text: the rule of an answer without calls."""
        rules = self._rules
        rules["answer"] = text if calls is None else self._answer(calls, text)
        rules["thought"] = f"{self._up_to('end_think', END_THINK)} SPACE?"
        begin = self._marker(THINK)
        starts = {"no": "answer", "may": f"answer | {begin} thought answer", "must": "thought answer"}
        return f"start: {starts[thinking]}\n" + "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _answer(self, calls: Calls, text: str) -> str:
        """Return the rule of an answer that may have calls."""
        form, several = calls.tool_format, calls.several
        begin, end = self._marker(form.begin), self._marker(form.end)
        self._rules["call"] = " | ".join(
            self._call(form, f"arguments_{n}", function) for n, function in enumerate(calls.functions)
        )
        if form.listed:
            more = '("," SPACE? call)*' if several else ""
            rest = f'SPACE? "[" call {more} "]" {end and "SPACE?"} {end}'
        else:
            # Without a beginning, more calls could not be distinguished from text.
            more = f"(SPACE? {begin} SPACE? call SPACE? {end})*" if several and begin else ""
            rest = f"SPACE? call SPACE? {end} {more}" if end else f"SPACE? call {more}"
        if calls.required:
            return f"{begin} {rest}"
        if text == INNER:
            return f"{begin} {rest} | {text}"
        if begin:
            return f"{self._up_to('begin_call', form.begin)} {rest} | TEXT"
        self._rules["NO_CALL"] = rf"/[^{{ \n]{ANYTHING}/"
        return f"{rest} | NO_CALL |"

    def _call(self, form: ToolFormat, arguments: str, function: Mapping[str, Any]) -> str:
        """Return the rule of a call of one function. arguments: the name of the rule of its arguments."""
        schema = function.get("parameters") or NO_PARAMETERS
        self._rules[arguments] = lark_json({**schema, "type": "object"})
        if form.named:
            return f"{self._marker(function['name'])} {self._marker(form.named)} {arguments}"
        head = f'{{"name": {lark_literal(function["name"])}, "{form.key}": '
        return f'{lark_literal(head)} {arguments} "}}"'

    def _marker(self, text: str) -> str:
        """Return a text in Lark: the token if it is one, since a grammar's text cannot contain special tokens."""
        number = self._token_id(text)
        return f"<[{number}]>" if number is not None else lark_literal(text) if text else ""

    def _up_to(self, name: str, marker: str) -> str:
        """Return the rule of any text that ends with a marker. name: of a rule for the marker's characters."""
        characters = re.escape(marker).replace("/", r"\/")
        self._rules[f"{name}[lazy]"] = f"/{ANYTHING}{characters}/"
        if self._token_id(marker) is None:
            return name
        return f"({name} | TEXT {self._marker(marker)})"
