"""/v1/responses through the official client: the same answers as chat completions, complete and streamed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from deskside.serve.responses_request import ResponsesRequest
from deskside.weights.load import Loaded, load_model
from tests.data.chat.templates import template
from tests.engine.test_generate import plain
from tests.serve.chatty import TEMPLATE, make_chatty, rendered
from tests.serve.in_process import with_client
from tests.serve.scripted import make_scripted

ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "more, 東京"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatty(tmp_path_factory.mktemp("responses"))[1]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_model(folder)


def answered(loaded: Loaded, *bodies: dict[str, Any]) -> list[Any]:
    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        return [await client.responses.create(**{**ASKED, **body}) for body in bodies]

    return with_client(loaded, ask)


def expected(loaded: Loaded, messages: list[dict[str, str]], new: int = 12) -> str:
    loaded.tokenizer.encode_special_tokens = False
    prompt = loaded.tokenizer.encode(rendered(messages), add_special_tokens=False).ids
    return loaded.tokenizer.decode(plain(loaded.model, prompt, new))


def test_a_response_is_the_chats_answer(loaded: Loaded) -> None:
    system = {"role": "system", "content": "be brief"}
    parts = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "yes?", "annotations": []}],
        },
        {"role": "user", "content": "more, 東京"},
    ]
    text, whole, same = answered(
        loaded,
        {"input": "hello", "metadata": {"a": "b"}, "store": True, "truncation": "disabled"},
        {"input": TALK, "instructions": "be brief"},
        {"input": parts},
    )
    assert text.output_text == expected(loaded, TALK[:1])
    assert whole.output_text == same.output_text == expected(loaded, [system, *TALK])
    assert (text.status, text.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert text.metadata == {"a": "b"} and text.object == "response" and text.id.startswith("resp_")
    assert text.usage.output_tokens == 12 and text.usage.total_tokens == text.usage.input_tokens + 12
    (item,) = whole.output
    assert (item.type, item.role, item.content[0].type) == ("message", "assistant", "output_text")


def test_a_response_can_be_sent_back(loaded: Loaded) -> None:
    (first,) = answered(loaded, {"input": "hello"})
    talk: list[Any] = [{"role": "user", "content": "hello"}, *first.output]
    (second,) = answered(loaded, {"input": [*talk, {"role": "user", "content": "more"}]})
    said = {"role": "assistant", "content": first.output_text}
    messages = [{"role": "user", "content": "hello"}, said, {"role": "user", "content": "more"}]
    assert second.output_text == expected(loaded, messages)


def test_a_stream_builds_the_same_response(loaded: Loaded) -> None:
    async def ask(client: openai.AsyncOpenAI) -> tuple[list[Any], Any, Any]:
        body: dict[str, Any] = {
            "input": "hello",
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        }
        events = [event async for event in await client.responses.create(**ASKED, **body, stream=True)]
        return events, await client.responses.create(**ASKED, **body)

    events, whole = with_client(loaded, ask)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 3
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == expected(loaded, TALK[:1])
    scored = [place for event in events[4 : 4 + deltas] for place in event.logprobs]
    assert len(scored) == 12 and [len(place.top_logprobs) for place in scored] == [2] * 12
    streamed = events[-1].response
    assert streamed.output[0].content == whole.output[0].content and streamed.usage == whole.usage


def test_the_clients_stream_helper_gets_an_answer_that_ends(loaded: Loaded) -> None:
    loaded.tokenizer.encode_special_tokens = False
    prompt = loaded.tokenizer.encode(rendered(TALK[:1]), add_special_tokens=False).ids
    free = plain(loaded.model, prompt, 12)
    stop = next(token for token in free[4:] if token not in free[:4])
    ending = replace(loaded, eos_tokens=frozenset({stop}))

    async def ask(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(**ASKED, input="hello") as stream:
            return await stream.get_final_response()

    final = with_client(ending, ask)
    assert final.status == "completed" and final.incomplete_details is None
    assert final.output_text == loaded.tokenizer.decode(free[: free.index(stop)])


def test_an_empty_answer_is_an_empty_message(loaded: Loaded) -> None:
    """In a response and in a stream."""
    loaded.tokenizer.encode_special_tokens = False
    prompt = loaded.tokenizer.encode(rendered(TALK[:1]), add_special_tokens=False).ids
    ending = replace(loaded, eos_tokens=frozenset(plain(loaded.model, prompt, 1)))

    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, Any]:
        async with client.responses.stream(**ASKED, input="hello") as stream:
            return await stream.get_final_response(), await client.responses.create(**ASKED, input="hello")

    for response in with_client(ending, ask):
        (item,) = response.output
        assert (item.type, item.status, item.content[0].text) == ("message", "completed", "")


def test_calls_are_items(folder: Path, tmp_path: Path) -> None:
    """Uses a template that writes calls like Qwen's, and a grammar that forces the model to write a call."""
    import shutil

    copied = tmp_path / "tools"
    shutil.copytree(folder, copied)
    hermes = (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
        "write <tool_call>\n</tool_call><|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (copied / "chat_template.jinja").write_text(hermes)
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tool = {
        "type": "function",
        "name": "count",
        "description": "counts",
        "parameters": schema,
        "strict": True,
    }
    body: dict[str, Any] = {
        "model": "tiny",
        "input": "hello",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "count"},
        "max_output_tokens": 300,
        "parallel_tool_calls": False,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],  # a call has none
    }

    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, list[Any], Any]:
        whole = await client.responses.create(**body)
        events = [event async for event in await client.responses.create(**body, stream=True)]
        call = whole.output[-1]
        talk: list[Any] = [
            {"role": "user", "content": "hello"},
            *whole.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
        ]
        again = {**body, "input": talk, "tool_choice": "auto", "max_output_tokens": 4}
        return whole, events, await client.responses.create(**again)

    whole, events, after = with_client(load_model(copied), ask)
    call = whole.output[-1]
    assert (call.type, call.name, whole.status) == ("function_call", "count", "completed")
    assert json.loads(call.arguments)["n"] in (1, 2)
    streamed = events[-1].response.output[0]
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == call.arguments
    assert events[-2].type == "response.output_item.done" and events[-1].type == "response.completed"
    assert after.output[0].type == "message" and after.usage.input_tokens > whole.usage.input_tokens


STOP = '{"name": "stop", "arguments": {}}'
OTHER = '{"name": "other", "arguments": {}}'


@pytest.mark.parametrize(
    ("said", "of_text"),
    [
        (["<think>", "why?", "</think>", "\n\n", "Sure.", " Hi."], ["Sure.", " Hi."]),
        (["Sure.", "\n\n", "<tool_call>", STOP, "</tool_call>"], ["Sure."]),
        (["<think>", "why?", "</think>", "Sure.", "<tool_call>", STOP, "</tool_call>"], ["Sure."]),
        (["<tool_call>", STOP, "</tool_call>"], []),
        (["Sure.", "<tool_call>", OTHER], ["Sure.", "<tool_call>", OTHER]),  # no call
    ],
)
def test_logprobs_are_those_of_the_text_beside_them(
    said: list[str], of_text: list[str], tmp_path: Path
) -> None:
    body: dict[str, Any] = {
        **ASKED,
        "input": "hello",
        "tools": [{"type": "function", "name": "stop", "parameters": None, "strict": False}],
        "include": ["message.output_text.logprobs"],
    }

    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        whole = await client.responses.create(**body)
        return whole, [event async for event in await client.responses.create(**body, stream=True)]

    whole, events = with_client(make_scripted(tmp_path, template("qwen3"), said), ask)
    for response in (whole, events[-1].response):
        parts = [item.content[0] for item in response.output if item.type == "message"]
        assert [place.token for part in parts for place in part.logprobs] == of_text
        assert "".join(part.text for part in parts) == "".join(of_text)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [place.token for event in deltas for place in event.logprobs] == of_text
    assert all(event.delta for event in deltas)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"background": 0.0}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": "the sea " * 5000}, "input"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "elephant"}}}}, "text"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(loaded: Loaded, body: dict[str, Any], param: str) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        await client.responses.create(**{"model": "tiny", "input": "hello", **body})

    with pytest.raises(openai.BadRequestError) as caught:
        with_client(loaded, ask)
    assert caught.value.param == param


def test_json_schema_and_reasoning_effort(loaded: Loaded, tmp_path: Path) -> None:
    form = {
        "type": "json_schema",
        "name": "a",
        "schema": {"type": "object", "properties": {}, "required": []},
    }
    form["schema"]["additionalProperties"] = False  # type: ignore[index]
    (found,) = answered(loaded, {"input": "hello", "text": {"format": form}, "max_output_tokens": 100})
    assert json.loads(found.output_text) == {}
    folder = make_chatty(tmp_path)[1]
    (folder / "chat_template.jinja").write_text(TEMPLATE + "{{ reasoning_effort }}")
    low, high = answered(
        load_model(folder),
        {"input": "hello", "reasoning": {"effort": "low"}},
        {"input": "hello", "reasoning": {"effort": "xhigh"}},
    )
    assert low.usage.input_tokens < high.usage.input_tokens and low.reasoning.effort == "low"


def test_all_reasoning_of_a_turn_is_kept() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [thought("a"), {"role": "assistant", "content": "so"}, thought("b"), thought("c"), call]
    chat = ResponsesRequest.model_validate({"input": [*items, {"role": "user", "content": "go"}]}).chat()
    turn, question = chat.messages
    assert (turn.reasoning_content, turn.content, turn.tool_calls and turn.tool_calls[0].id) == (
        "a\nb\nc",
        "so",
        "1",
    )
    assert question.role == "user"
