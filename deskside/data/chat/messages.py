"""Conversations: their messages and tools, checked and brought to the one form that chat templates expect.

A message has a role, a text and perhaps a name, reasoning, tool calls, or the id of the call that it answers. Data and
clients write the same thing in several ways, which are unified here:

    content: a list of text parts, or null beside tool calls    a text
    reasoning, thinking                                         reasoning_content
    function_call, the role "function" (OpenAI's older format)  tool_calls, the role "tool"
    arguments of a call: the text of a JSON object              the object
    a tool or call without its envelope {"type": "function", "function": ...}    with it
    tools: the text of a JSON list                              the list

Everything else is refused, so that no field is silently left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, json_value

# The fields of a message.
FIELDS = frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"})
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the same field

Message = Mapping[str, Any]


class NotRendered(UsageError):
    """Raised for a conversation or record that cannot be used. The message gives the reason."""


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form that a chat template renders.

    messages: of `checked_messages`. tools: functions that the model may call, {"type": "function", "function": {...}}.
    chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = field(default_factory=list)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def with_messages(self, messages: Sequence[Message]) -> Conversation:
        """Return a conversation with the same tools and other messages."""
        return dataclasses.replace(self, messages=messages)

    def first(self, count: int) -> Conversation:
        """Return the conversation with only messages[:count]."""
        return self.with_messages(self.messages[:count])


def message_text(message: Message) -> str:
    """Return the text of a message for readers: its reasoning, its content, and its calls as JSON."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    parts = [
        message.get("reasoning_content"),
        message["content"],
        json.dumps(calls, ensure_ascii=False) if calls else "",
    ]
    return "\n".join(part for part in parts if part)


def checked_conversation(
    messages: object, tools: object = None, chat_template_kwargs: object = None
) -> Conversation:
    """Validate the parts of a conversation in a record or request, and return it. Raises NotRendered."""
    kwargs = chat_template_kwargs or {}
    if not isinstance(kwargs, Mapping):
        raise NotRendered("chat_template_kwargs is not an object")
    _check_json("chat_template_kwargs", kwargs)
    return Conversation(checked_messages(messages), checked_tools(tools), dict(kwargs))


def checked_messages(value: object) -> list[dict[str, Any]]:
    """Validate messages, and return them in the form of this module, without empty optional fields.

    The results of the same message's calls are returned in the order of the calls. Raises NotRendered for an invalid
    conversation or an unsupported field.
    """
    if not isinstance(value, list) or not value:
        raise NotRendered("it is not a list of messages")
    messages = [_checked_message(number, message) for number, message in enumerate(value, start=1)]
    return _with_ordered_results(messages)


def _checked_message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise NotRendered(f"message {number} has no role")
    where = f"message {number} ({message['role'][:40]})"
    _check_json(where, message)
    fields = {str(name): field for name, field in message.items() if not _is_empty(field)}
    fields["role"] = "tool" if message["role"] == "function" else message["role"]
    if call := fields.pop("function_call", None):
        if "tool_calls" in fields:
            raise NotRendered(f"{where} has both tool_calls and function_call; leave one out")
        fields["tool_calls"] = [call]
    reasoning = [fields.pop(name) for name in REASONING if name in fields]
    if reasoning:
        fields["reasoning_content"] = reasoning[0]
        if any(text != reasoning[0] for text in reasoning):
            raise NotRendered(f"{where} has two different reasonings")
    if unknown := sorted(fields.keys() - FIELDS):
        raise NotRendered(
            f"{where} has {', '.join(unknown)[:120]}, which is not supported; take it out of the data"
        )
    checked = {"role": fields["role"], "content": _content(where, message, fields)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if name in fields:
            checked[name] = fields[name]
            if not isinstance(checked[name], str):
                raise NotRendered(f"{where} has a {name} that is not text")
    if "tool_calls" in fields:
        if checked["role"] != "assistant" or not isinstance(fields["tool_calls"], list):
            raise NotRendered(f"{where} has tool_calls that are not a list of the assistant's calls")
        checked["tool_calls"] = [_checked_call(where, call) for call in fields["tool_calls"]]
    return checked


def _content(where: str, message: Message, fields: Mapping[str, Any]) -> str:
    """Return the text of a message. It may be missing if there are calls or reasoning."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(where, part) for part in content)
    if content is None and not fields.keys().isdisjoint(("tool_calls", "reasoning_content")):
        content = ""
    if not isinstance(content, str):
        raise NotRendered(f"{where} has no text")
    return content


def _part_text(where: str, part: object) -> str:
    """Return the text of a part of a message's content. where: names the message in an error."""
    if isinstance(part, Mapping):
        fields = {name: field for name, field in part.items() if not _is_empty(field)}
        text = part.get("text")
        only_text = fields.keys() <= {"type", "text"} and fields.get("type", "text") == "text"
        if only_text and isinstance(text, str):
            return text
    raise NotRendered(f"{where} has content that is not text, such as an image; only text is supported")


def _checked_call(where: str, call: object) -> dict[str, Any]:
    """Return a tool call in the form {"id", "type": "function", "function": {"name", "arguments"}}; id is optional."""
    fields = _without_empty(call)
    function = _without_empty(fields.pop("function")) if "function" in fields else fields
    call_id, kind = fields.pop("id", None), fields.pop("type", "function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(f"{where} has a tool call with arguments", arguments)
    known = function.keys() <= {"name", "arguments"} and (function is fields or not fields)
    if not known or kind != "function" or not isinstance(function.get("name"), str):
        raise NotRendered(f"{where} has a tool call that is not a name and arguments")
    if not isinstance(arguments, Mapping):
        raise NotRendered(f"{where} has a tool call with arguments that are not a JSON object")
    if not isinstance(call_id, str | None):
        raise NotRendered(f"{where} has a tool call with an id that is not text")
    checked = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return checked if call_id is None else {"id": call_id, **checked}


def checked_tools(value: object) -> list[dict[str, Any]]:
    """Validate the functions that a model may call, and return them in the form of `Conversation.tools`.

    value: a list, the text of a JSON list, or None. Raises NotRendered.
    """
    if isinstance(value, str) and value:
        value = _parsed("the record has tools", value)
    if not value:
        return []
    if not isinstance(value, list):
        raise NotRendered("tools is not a list")
    _check_json("tools", value)
    tools = []
    for number, tool in enumerate(value, start=1):
        fields = dict(tool) if isinstance(tool, Mapping) else {}
        kind = fields.pop("type", None) or "function"
        if "function" not in fields:
            fields = {"function": fields}
        function = fields["function"]
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not named or kind != "function":
            raise NotRendered(f"tool {number} is not a function with a name")
        tools.append({"type": "function", **fields})
    return tools


def _with_ordered_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the results of the same message's calls in the order of the calls.

    Many templates write neither the id nor the name of the call that a result answers, so its place has to show it.
    Raises NotRendered for a result without a call, or with another name than the call.
    """
    ordered: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []  # of the last message that is no result
    results: dict[int, dict[str, Any]] = {}  # by the place of their call
    for number, message in enumerate(messages, start=1):
        if message["role"] != "tool":
            ordered += [results[place] for place in sorted(results)]
            calls, results = message.get("tool_calls", []), {}
            ordered.append(message)
            continue
        place = _place(calls, message, len(results))
        if calls and (place is None or place in results):
            raise NotRendered(f"message {number} (tool) answers no call of the message before it")
        if not calls and "tool_call_id" in message:
            raise NotRendered(f"message {number} (tool) answers a call that is not in the message before it")
        if calls and place is not None:
            called = calls[place]["function"]["name"]
            if message.get("name", called) != called:
                raise NotRendered(
                    f"message {number} (tool) answers a call of {called[:60]!r} by another name"
                )
        results[len(results) if place is None else place] = message
    return ordered + [results[place] for place in sorted(results)]


def _place(calls: list[dict[str, Any]], result: Message, number: int) -> int | None:
    """Return the place among `calls` of the one that a result answers, by its id if both have one, or None.

    number: how many results came before.
    """
    ids = [call.get("id") for call in calls]
    if "tool_call_id" in result and any(ids):
        return ids.index(result["tool_call_id"]) if result["tool_call_id"] in ids else None
    return number if number < len(calls) else None


def _parsed(what: str, text: str) -> Any:
    try:
        return json_value(text, big_integers=True, finite=True)
    except Unreadable as error:
        raise NotRendered(f"{what} that are not JSON: {error}") from None


def _check_json(where: str, value: object) -> None:
    """Raise NotRendered for a value that is not JSON, such as one that contains half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        raise NotRendered(f"{where} holds half of a surrogate pair") from None
    except (TypeError, ValueError) as error:
        raise NotRendered(f"{where} holds what is not JSON: {str(error)[:100]}") from None


def _without_empty(value: object) -> dict[str, Any]:
    """Return the fields of an object that are not empty; {} for anything else."""
    fields = value.items() if isinstance(value, Mapping) else ()
    return {str(name): field for name, field in fields if not _is_empty(field)}


def _is_empty(value: object) -> bool:
    """Return True if a field is empty. Parquet files have null for fields that only other rows have."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)
