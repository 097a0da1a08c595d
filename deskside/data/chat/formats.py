"""Formats of records with conversations. Each record is recognized on its own, by its fields.

    OpenAI      messages: [{"role": "user", "content": "..."}, ...]
    ShareGPT    conversations: [{"from": "human", "value": "..."}, ...]
    Alpaca      instruction, output, and perhaps input and history: [["question", "answer"], ...]

The first message of a list shows its format, so `messages` may also hold ShareGPT's, and `conversations` OpenAI's. A
record with several formats is read as the first of these. In all of them a record may have `system`, `tools` (or
`functions`, OpenAI's older name) and `chat_template_kwargs`. Other fields of a record, such as ids, are not part of the
conversation.
"""

from collections.abc import Mapping
from typing import Any, Literal

from deskside.data.chat.messages import Conversation, NotRendered, checked_conversation, checked_messages
from deskside.utils.parsing import Unreadable, json_value

Format = Literal["OpenAI", "ShareGPT", "Alpaca"]
EXTRA_FIELDS = ("system", "tools", "functions", "chat_template_kwargs")
RECORD_FIELDS = ("messages", "conversations", "instruction", "input", "output", "history", *EXTRA_FIELDS)
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",  # its value is the JSON text of one or several calls
    "observation": "tool",
    "tool": "tool",
}


def conversation_of(fields: Mapping[str, Any]) -> tuple[Format, Conversation]:
    """Return the format and the conversation of a record. Raises NotRendered for one that cannot be used."""
    format_: Format
    value = fields.get("messages") or fields.get("conversations")
    if value:
        format_, messages = ("ShareGPT" if _is_sharegpt(value) else "OpenAI"), as_openai_messages(value)
    elif fields.get("instruction") and isinstance(fields.get("output"), str):
        format_, messages = "Alpaca", _alpaca_messages(fields)
    else:
        raise NotRendered("it has no messages, no conversations, and no instruction with an output")
    return format_, with_extras(fields, messages)


def with_extras(fields: Mapping[str, Any], messages: Any) -> Conversation:
    """Return the conversation of messages and of a record's EXTRA_FIELDS. Raises NotRendered."""
    tools, functions = fields.get("tools"), fields.get("functions")
    if tools and functions:
        raise NotRendered("the record has both tools and functions; leave one out")
    conversation = checked_conversation(messages, tools or functions, fields.get("chat_template_kwargs"))
    system = fields.get("system")
    if not system:
        return conversation
    added = checked_messages([{"role": "system", "content": system}])
    first = conversation.messages[0]
    if first["role"] != "system":
        return conversation.with_messages([*added, *conversation.messages])
    if first["content"] != added[0]["content"]:
        raise NotRendered("the record's system differs from its system message; leave one out")
    return conversation


def as_openai_messages(messages: Any) -> Any:
    """Return messages of ShareGPT's format in OpenAI's; other values are returned as they are. Raises NotRendered."""
    if not _is_sharegpt(messages):
        return messages
    return [_sharegpt_message(number, message) for number, message in enumerate(messages, start=1)]


def _is_sharegpt(messages: Any) -> bool:
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, Mapping) and "from" in first and "role" not in first


def _sharegpt_message(number: int, message: Any) -> dict[str, Any]:
    fields = dict(message) if isinstance(message, Mapping) else {}
    sender, value = fields.pop("from", None), fields.pop("value", None)
    if sender not in SHAREGPT_ROLES:
        raise NotRendered(
            f"message {number} is from {str(sender)[:40]!r}, which is none of {', '.join(SHAREGPT_ROLES)}"
        )
    if others := [name for name in ("role", "content", "tool_calls") if fields.get(name)]:
        raise NotRendered(f"message {number} has both 'from' and {others[0]!r}; leave one out")
    role = SHAREGPT_ROLES[sender]
    if sender != "function_call":
        return {**fields, "role": role, "content": value}
    try:
        calls = json_value(value, big_integers=True, finite=True) if isinstance(value, str) else value
    except Unreadable as error:
        raise NotRendered(f"message {number} (function_call) is not JSON: {error}") from None
    return {
        **fields,
        "role": role,
        "content": None,
        "tool_calls": calls if isinstance(calls, list) else [calls],
    }


def _alpaca_messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    history = fields.get("history") or []
    turns = [*history, (fields["instruction"], fields["output"])] if isinstance(history, list) else [None]
    messages = []
    for turn in turns:
        if not isinstance(turn, (list, tuple)) or len(turn) != 2:
            raise NotRendered("its history is not a list of questions with answers")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    given = fields.get("input")
    if given:
        if not isinstance(given, str) or not isinstance(fields["instruction"], str):
            raise NotRendered("its instruction or input is not text")
        messages[-2]["content"] = f"{fields['instruction']}\n\n{given}"
    return messages
