"""Record formats: each is recognised by its fields and gives the same conversation as OpenAI's format."""

import json
from typing import Any

import pytest

from deskside.data.chat.formats import as_openai_messages, conversation_of
from deskside.data.chat.messages import Conversation, NotRendered
from tests.data.chat.tricky import WEATHER
from tests.data.chat_tokenizer import talk

CALL = {"name": "weather", "arguments": {"place": "Pune"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
ROLES = {"user": "human", "assistant": "gpt"}
TALK = talk("a", "b", "c", "d", system="s")


def sharegpt(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"from": ROLES.get(m["role"], m["role"]), "value": m["content"]} for m in messages]


@pytest.mark.parametrize(
    "record, format_, messages",
    [
        ({"messages": TALK}, "OpenAI", TALK),
        ({"conversations": TALK, "messages": None}, "OpenAI", TALK),
        ({"conversations": sharegpt(TALK)}, "ShareGPT", TALK),
        ({"messages": sharegpt(TALK), "conversations": []}, "ShareGPT", TALK),
        ({"conversations": sharegpt(TALK[1:]), "system": "s"}, "ShareGPT", TALK),
        ({"messages": TALK, "system": "s"}, "OpenAI", TALK),
        ({"messages": TALK[1:], "system": ""}, "OpenAI", TALK[1:]),
        ({"instruction": "a", "output": "b"}, "Alpaca", talk("a", "b")),
        ({"instruction": "a", "input": "", "output": ""}, "Alpaca", talk("a", "")),
        (
            {"instruction": "a", "input": "b", "output": "c", "system": "s"},
            "Alpaca",
            talk("a\n\nb", "c", system="s"),
        ),
        (
            {"instruction": "c", "input": "d", "output": "e", "history": [["a", "b"]], "messages": []},
            "Alpaca",
            talk("a", "b", "c\n\nd", "e"),
        ),
        ({"messages": talk("a", "b"), "instruction": "x", "output": "y"}, "OpenAI", talk("a", "b")),
    ],
)
def test_records_are_recognised_by_their_fields(
    record: dict[str, Any], format_: str, messages: list[dict[str, Any]]
) -> None:
    assert conversation_of(record) == (format_, Conversation(messages))


@pytest.mark.parametrize("value", [json.dumps(CALL), json.dumps([CALL]), CALL, [CALL]])
@pytest.mark.parametrize("observation", ["observation", "tool"])
@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER["function"]])])
def test_calls_and_tools_of_sharegpt(value: Any, observation: str, tools: Any) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": value, "name": None}]
    record = {"conversations": [*turns, {"from": observation, "value": "sun"}, {"from": "gpt", "value": "b"}]}
    found = conversation_of({**record, "tools": tools})[1]
    question, answer = talk("a", "b")
    assert found.messages == [question, CALLING, {"role": "tool", "content": "sun"}, answer]
    assert found.tools == [WEATHER]


def test_functions_and_template_arguments() -> None:
    found = conversation_of(
        {"messages": talk("a", "b"), "functions": [WEATHER["function"]], "chat_template_kwargs": {"x": True}}
    )[1]
    assert found == Conversation(talk("a", "b"), [WEATHER], {"x": True})


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"messages": []},
        {"messages": "hello"},
        {"messages": {"role": "user", "content": "a"}},
        {"instruction": "a"},
        {"instruction": "a", "output": None},
        {"instruction": ["a"], "output": "b"},
        {"instruction": ["a"], "input": "x", "output": "b"},
        {"instruction": "a", "input": {"x": 1}, "output": "b"},
        {"instruction": "a", "output": "b", "history": ["a", "b"]},
        {"instruction": "a", "output": "b", "history": "a"},
        {"messages": TALK, "system": "another"},
        {"messages": talk("a", "b"), "system": ["s"]},
        {"messages": talk("a", "b"), "system": "\ud800"},
        {"messages": talk("a", "b"), "tools": [WEATHER], "functions": [WEATHER]},
        {"conversations": [{"from": "wizard", "value": "a"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, "b"]},
        {"conversations": [{"from": "human", "value": "a", "weight": 1}]},
        {"conversations": [{"from": "human", "value": "a", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a", "role": "system"}]},
        {"conversations": [{"from": "function_call", "value": json.dumps(CALL), "tool_calls": [CALL]}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "f(x)"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "3"}]},
    ],
)
def test_other_records_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(NotRendered):
        conversation_of(record)


@pytest.mark.parametrize("messages", [TALK, [], "hello", None, [1]])
def test_other_values_are_left_as_they_are(messages: Any) -> None:
    assert as_openai_messages(messages) is messages
