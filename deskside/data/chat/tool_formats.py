"""The forms in which models write tool calls. A model's form is found by rendering a call with its chat template.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>    Qwen 2.5 and 3, Hermes
[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]        Mistral
[TOOL_CALLS]name[ARGS]{...}                                 Mistral since version 11 of its tokenizer
{"name": ..., "parameters": {...}}                          Llama 3.1 to 3.3
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deskside.data.chat.messages import Conversation, NotRendered
from deskside.data.chat.template_support import TOOL

ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
THINK, END_THINK = "<think>", "</think>"
_NAME, _WORD = "trialfunction", "trialtext"
_ARGUMENTS = rf'\{{"{_WORD}": ?"{_WORD}"\}}'
_JSON_CALL = rf'\{{"name": ?"{_NAME}", ?"(?P<key>arguments|parameters)": ?{_ARGUMENTS}(, ?"id": ?"\w*")?\}}'
_NAMED_CALL = rf"{_NAME}(\[CALL_ID\]\w+)?(?P<named>\[ARGS\]){_ARGUMENTS}"


@dataclass(frozen=True)
class ToolFormat:
    """The form of tool calls.

    Attributes:
        begin, end: Texts around a call. `begin` is "" if an answer that calls a tool begins with the JSON of the call.
        key: The key of the arguments in the JSON of a call.
        listed: The calls are one JSON list after `begin`.
        named: If it is not "", a call is the name of the function, this text and the arguments.
    """

    begin: str
    end: str = ""
    key: str = "arguments"
    listed: bool = False
    named: str = ""


def new_call_id() -> str:
    """Return a random id of a call: nine letters or digits, the only ids that Mistral's templates accept."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(9))


def find_tool_format(render: Callable[[Conversation, bool], str]) -> ToolFormat | None:
    """Return the format in which a template writes calls; None if it writes none, or in a form that is not known.

    Some templates write calls only beside tools. render: renders a conversation, with the generation prompt if the
    second argument is true; may raise NotRendered.
    """
    return _find_tool_format(render, []) or _find_tool_format(render, [TOOL])


def _find_tool_format(
    render: Callable[[Conversation, bool], str], tools: Sequence[Mapping[str, Any]]
) -> ToolFormat | None:
    question = {"role": "user", "content": _WORD}
    call = {"type": "function", "function": {"name": _NAME, "arguments": {_WORD: _WORD}}, "id": "trial0001"}
    try:
        prompt = render(Conversation([question], tools), True)
        plain = render(Conversation([question, {"role": "assistant", "content": _NAME}], tools), False)
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = render(Conversation([question, calling], tools), False)
    except NotRendered:
        return None
    if not text.startswith(prompt):
        return None
    answer = text[len(prompt) :].removesuffix(plain.rpartition(_NAME)[2]).rpartition(END_THINK)[2].strip()
    match = re.fullmatch(
        rf"(?P<begin>[^\s\w{{]\S*?(?:\s*\[)?|)\s*(?:{_JSON_CALL}|{_NAMED_CALL})\s*(?P<end>\S*)", answer
    )
    if match is None:
        return None
    begin, end = match["begin"], match["end"]
    if match["named"]:
        return None if end else ToolFormat(begin, named=match["named"])
    if begin.endswith("[") and end.startswith("]"):
        return ToolFormat(begin[:-1].strip(), end[1:], match["key"], listed=True)
    return ToolFormat(begin, end, match["key"])
