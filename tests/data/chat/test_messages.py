"""Validation of messages and tools, and their normal form."""

import json
import math
from typing import Any

import pytest

from deskside.data.chat.messages import NotRendered, checked_conversation, checked_messages, checked_tools

USER = {"role": "user", "content": "a"}
ADD = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
LIST = {"id": "2", "type": "function", "function": {"name": "list", "arguments": {}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [ADD, LIST]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def result(content: str, **fields: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}


@pytest.mark.parametrize(
    "messages, reason",
    [
        ("hello", "not a list"),
        ([], "not a list"),
        ([{"content": "a"}], "message 1 has no role"),
        ([USER, {"role": "assistant", "content": None}], "message 2 .assistant. has no"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        ([{"role": "user", "content": "a", "name": b"b"}], "not JSON"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "not a name and arguments"),
        ([{**CALLS, "tool_calls": [{**ADD, "index": 0}]}], "not a name and arguments"),
        ([{**CALLS, "tool_calls": [{**ADD, "type": "custom"}]}], "not a name and arguments"),
        ([{**CALLS, "tool_calls": ADD}], "not a list"),
        ([{**CALLS, "role": "user"}], "the assistant's calls"),
        ([{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}], "not JSON"),
        ([{"role": "assistant", "function_call": {"name": "f", "arguments": "[1]"}}], "not a JSON object"),
        ([{"role": "assistant", "content": "a", "reasoning": "b", "thinking": "c"}], "two different"),
        ([{"role": "assistant", "content": "a", "weight": 0}], "has weight"),
        ([{**CALLS, "function_call": ADD["function"]}], "both tool_calls and function_call"),
        ([{**CALLS, "function_call": ADD["function"], "tool_calls": 5}], "both tool_calls and function_call"),
        ([{"role": "assistant", "function_call": {"name": "f", "arguments": {"a": math.nan}}}], "not JSON"),
        (
            [{"role": "user", "content": [{"type": "image_url", "text": "a", "image_url": "b"}]}],
            "content that is not text",
        ),
        ([{"role": "user", "content": "a", "name": 5}], "name that is not text"),
        ([USER, CALLS, result("3", tool_call_id="9")], "message 3 .tool. answers no call"),
        ([USER, CALLS, result("3"), result("4"), result("5")], "message 5 .tool. answers no call"),
        ([USER, CALLS, result("3", tool_call_id="1"), result("4", tool_call_id="1")], "answers no call"),
        ([USER, CALLS, result("3", name="list")], "by another name"),
        ([USER, result("3", tool_call_id="1")], "not in the message before"),
    ],
)
def test_invalid_conversations_are_refused_with_a_reason(messages: Any, reason: str) -> None:
    with pytest.raises(NotRendered, match=reason):
        checked_messages(messages)


def test_fields_without_a_value_are_left_out() -> None:
    """Parquet files have null in the fields of other rows, and clients send back all fields of an answer."""
    given = {**USER, "tool_calls": [], "refusal": None, "name": "", "audio": {}}
    assert checked_messages([given]) == [USER]
    assert checked_messages([{**given, "name": "Ada"}]) == [{**USER, "name": "Ada"}]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}])[0]["content"] == "ab"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize(
    "calls",
    [
        [ADD, LIST],
        [{**ADD["function"], "id": "1"}, {"id": "2", "function": {"name": "list", "arguments": ""}}],  # type: ignore[dict-item]
        [
            {"id": "1", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}, "type": None},
            {"id": "2", "name": "list", "arguments": "{}"},
        ],
    ],
)
def test_calls_are_brought_to_one_form(content: dict[str, Any], calls: list[Any]) -> None:
    assert checked_messages([USER, {"role": "assistant", **content, "tool_calls": calls}]) == [USER, CALLS]


def test_older_names_of_fields() -> None:
    call = {"name": "list", "arguments": "{}"}
    found = checked_messages(
        [
            {"role": "assistant", "content": None, "function_call": call, "reasoning": "why"},
            {"role": "function", "name": "list", "content": "[]"},
            {"role": "assistant", "content": "a", "thinking": "b", "reasoning_content": "b"},
        ]
    )
    without_id = {name: value for name, value in LIST.items() if name != "id"}
    assert found == [
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [without_id]},
        {"role": "tool", "name": "list", "content": "[]"},
        {"role": "assistant", "content": "a", "reasoning_content": "b"},
    ]


def test_results_are_in_the_order_of_their_calls() -> None:
    by_id = [result("[]", tool_call_id="2", name="list"), result("3", tool_call_id="1")]
    assert checked_messages([USER, CALLS, *by_id, USER]) == [USER, CALLS, *by_id[::-1], USER]
    without_ids = [result("3"), result("[]")]
    assert checked_messages([USER, CALLS, *without_ids]) == [USER, CALLS, *without_ids]
    written_as_text = [{"role": "assistant", "content": "add(1)"}, *without_ids]
    assert checked_messages(written_as_text) == written_as_text


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        [TOOL["function"]],
        json.dumps([TOOL["function"]]),
        [{"type": "function", **TOOL["function"]}],  # type: ignore[dict-item]
        [{"function": TOOL["function"], "type": None}],
    ],
)
def test_tools_are_brought_to_one_form(tools: Any) -> None:
    assert checked_tools(tools) == [TOOL]
    assert checked_conversation([USER], tools).tools == [TOOL]


def test_no_tools() -> None:
    assert checked_tools(None) == checked_tools([]) == checked_tools("") == []


@pytest.mark.parametrize(
    "tools",
    [
        {"name": "f"},
        "{",
        "7",
        ["f"],
        [{"function": {"name": 1}}],
        [{"type": "web_search"}],
        [{"type": "custom", "name": "f"}],
        [{**TOOL, "type": "x"}],
    ],
)
def test_invalid_tools_are_refused(tools: Any) -> None:
    with pytest.raises(NotRendered):
        checked_tools(tools)


@pytest.mark.parametrize("kwargs", [[1], "a", {"a": b"b"}])
def test_invalid_template_arguments_are_refused(kwargs: Any) -> None:
    with pytest.raises(NotRendered, match="chat_template_kwargs"):
        checked_conversation([USER], chat_template_kwargs=kwargs)
