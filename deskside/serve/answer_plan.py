"""The form of the answers to a request: whether they have reasoning, which calls, and the grammar that they follow."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from deskside.data.chat.answer_parser import AnswerParser, Thinking
from deskside.data.chat.tool_formats import END_THINK, THINK
from deskside.engine.grammar import Grammar, Grammars
from deskside.serve.answer_grammar import NO_PARAMETERS, Calls, answer_grammar
from deskside.serve.protocol import ApiError, ChatRequest, CompletionRequest
from deskside.serve.structured import GrammarSource
from deskside.serve.templating import PromptEncoder
from deskside.utils.errors import UsageError


@dataclass(frozen=True)
class AnswerPlan:
    """The form of the answers to one prompt.

    Attributes:
        calls: The functions that they may call; None without any.
        text: The grammar of their text; None for any text.
        constrained: Whether calls follow a grammar although the text has none.
        skip_special_tokens: False if the parts of an answer are separated by special tokens.
    """

    thinking: Thinking = "no"
    calls: Calls | None = None
    text: GrammarSource | None = None
    constrained: bool = False
    skip_special_tokens: bool = True

    def parser(self) -> AnswerParser | None:
        """Return a parser for one answer; None if all of it is text."""
        if self.thinking == "no" and self.calls is None:
            return None
        calls = self.calls
        names = [] if calls is None else [str(function["name"]) for function in calls.functions]
        return AnswerParser(self.thinking, None if calls is None else calls.tool_format, names)

    @property
    def has_grammar(self) -> bool:
        """True if the answers follow a grammar."""
        return self.text is not None or self.constrained

    def grammar(self, grammars: Grammars) -> Grammar:
        """Compile the grammar of the answers, which must have one. Raises ApiError."""
        text = self.text
        if text is not None and self.thinking == "no" and self.calls is None:
            return _compiled(grammars, text)
        try:
            outer = answer_grammar(self.thinking, self.calls, text is not None, grammars.special_token)
            return grammars.compile("lark", outer) if text is None else grammars.compile(*text[1:], outer)
        except UsageError as error:
            self._check_parts(grammars)
            field = "tools" if text is None else text.field
            raise ApiError(400, f"{field}: {error}", param=field) from None

    def _check_parts(self, grammars: Grammars) -> None:
        """Raise ApiError for the first function or text format whose own grammar cannot be compiled."""
        for function in [] if self.calls is None else self.calls.functions:
            schema = json.dumps(function.get("parameters") or NO_PARAMETERS)
            _compiled(
                grammars, GrammarSource("tools", "json", schema), f"the parameters of {function['name']}: "
            )
        if self.text is not None:
            _compiled(grammars, self.text)


def plan_answers(
    body: ChatRequest | CompletionRequest, encoder: PromptEncoder, prompt: Sequence[int]
) -> AnswerPlan:
    """Return the form of the answers to a prompt. Raises ApiError for tools that the model cannot call."""
    text = body.text_grammar()
    if not isinstance(body, ChatRequest):
        return AnswerPlan(text=text)
    thinking = encoder.thinking(prompt)
    markers = [] if thinking == "no" else [THINK, END_THINK]
    calls = None
    if functions := [function.model_dump(exclude_none=True) for function in body.callable_functions]:
        form = encoder.tool_format
        if form is None:
            raise ApiError(
                400,
                "tools: this model's chat template writes calls in a form that the server cannot read; leave tools out",
                param="tools",
            )
        calls = Calls(form, functions, body.requires_call, body.parallel_tool_calls is not False)
        markers += [form.begin, form.end, form.named]
    return AnswerPlan(
        thinking,
        calls,
        text,
        constrained=calls is not None and body.constrains_calls,
        skip_special_tokens=not any(encoder.is_special(marker) for marker in markers),
    )


def _compiled(grammars: Grammars, source: GrammarSource, what: str = "") -> Grammar:
    """Compile a grammar. what: names its part of the field in an error. Raises ApiError."""
    try:
        return grammars.compile(source.kind, source.text)
    except UsageError as error:
        raise ApiError(400, f"{source.field}: {what}{error}", param=source.field) from None
