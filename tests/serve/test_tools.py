"""Tools and reasoning through the official client: the prompt, calls that follow their schemas, parts of answers."""

import json
import shutil
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import validate
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from deskside.weights.load import Loaded, load_model
from tests.data.chat.templates import template
from tests.serve.in_process import with_client
from tests.serve.made_run import make
from tests.serve.scripted import make_scripted

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "stop": {"properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "stop"}},
]
HELLO: list[Any] = [{"role": "user", "content": "the sea?"}]
TEMPLATES = ("qwen3", "qwen2_5", "llama3_1", "mistral", "mistral_named")
Ask = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Return a function that loads one set of random weights with the chat template of this name."""
    made = make(tmp_path_factory.mktemp("tools")).path
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))

    @cache
    def load(name: str) -> Loaded:
        path = Path(shutil.copytree(made, made.parent / name))
        (path / "chat_template.jinja").write_text(template(name), "utf-8")
        # These markers are special tokens, which have no text in other answers.
        if name.startswith("mistral"):
            file = path / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.add_special_tokens(
                [AddedToken(m, normalized=False) for m in ("[TOOL_CALLS]", "[ARGS]")]
            )
            tokenizer.save(str(file))
        return load_model(path)

    return load


async def ask(client: openai.AsyncOpenAI, stream: bool = False, **fields: Any) -> Any:
    """Return the first choice of an answer. A streamed answer is assembled by the client."""
    given = {"model": "tiny", "messages": HELLO, "max_tokens": 1500, "seed": 1, **fields}
    if not stream:
        return (await client.chat.completions.create(**given)).choices[0]
    async with client.chat.completions.stream(**given) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_required_calls_follow_their_schemas(
    loaded: Callable[[str], Loaded], name: str, stream: bool
) -> None:
    # Random weights would think for ever.
    off = {"chat_template_kwargs": {"enable_thinking": False}} if name == "qwen3" else {}

    async def run(client: openai.AsyncOpenAI) -> None:
        for seed in range(2):
            choice = await ask(
                client,
                stream,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                seed=seed,
                extra_body=off,
            )
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            assert calls_of(choice)
            for function, arguments in calls_of(choice):
                validate(json.loads(arguments), SCHEMAS[function])
            assert all(len(call.id) == 9 for call in choice.message.tool_calls)

    with_client(loaded(name), run)


def test_a_stream_has_the_calls_of_the_whole_answer(
    loaded: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deskside.serve.pending.PIECE_SECONDS", 0.0)

    async def run(client: openai.AsyncOpenAI) -> None:
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 3}
        whole, streamed = await ask(client, **fields), await ask(client, True, **fields)
        assert calls_of(whole) == calls_of(streamed)
        chunks = [
            c
            async for c in await client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, **fields
            )
        ]
        deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        assert len(deltas) > 2 + len(calls_of(whole))  # arguments arrive as they are generated
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    with_client(loaded("qwen2_5"), run)


@pytest.mark.full
def test_choice_of_a_function_and_number_of_calls(loaded: Callable[[str], Loaded]) -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        named = {"type": "function", "function": {"name": "get_weather"}}
        numbers = set()
        for seed in range(2):
            choice = await ask(client, tools=TOOLS, tool_choice=named, seed=seed)
            assert {function for function, _ in calls_of(choice)} == {"get_weather"}
            numbers.add(len(calls_of(choice)))
            single = await ask(
                client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
            )
            assert len(calls_of(single)) == 1
        assert max(numbers) > 1

    with_client(loaded("qwen2_5"), run)


def test_an_answer_may_call_or_follow_its_format(loaded: Callable[[str], Loaded]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}}

    async def run(client: openai.AsyncOpenAI) -> None:
        choice = await ask(client, tools=TOOLS, response_format=form, parallel_tool_calls=False)
        assert choice.message.content == "7" or calls_of(choice)
        choice = await ask(client, tools=TOOLS, tool_choice="none", response_format=form)
        assert choice.message.content == "7" and not calls_of(choice)

    with_client(loaded("qwen2_5"), run)


def test_without_tools_nothing_is_constrained(loaded: Callable[[str], Loaded]) -> None:
    async def run(client: openai.AsyncOpenAI) -> list[Any]:
        options: list[dict[str, Any]] = [{}, {"parallel_tool_calls": False}, {"tool_choice": "auto"}]
        return [(await ask(client, max_tokens=30, **fields)).message.content for fields in options]

    plain, *others = with_client(loaded("qwen2_5"), run)
    assert others == [plain, plain]


STOP = '{"name": "stop", "arguments": {}}'
SAID: list[tuple[str, list[str], list[str], tuple[str | None, str | None, list[str]]]] = [
    # template, pieces that the model says, special tokens; content, reasoning, called functions
    ("qwen3", ["<think>", "why?", "</think>", "Hi."], [], ("Hi.", "why?", [])),
    ("qwen3", ["<think>", "why?"], ["<think>"], (None, "why?", [])),
    (
        "qwen3",
        ["<think>", "why?", "</think>", "Sure.", "<tool_call>", STOP, "</tool_call>"],
        ["<think>", "</think>"],
        ("Sure.", "why?", ["stop"]),
    ),
    ("qwen2_5", ["Hi <think>"], [], ("Hi <think>", None, [])),
    ("qwen2_5", ["<tool_call>", '{"name": "other", "arguments": {}}'], [], (None, None, [])),
    ("llama3_1", ['{"name": "stop", ', '"parameters": {}}'], [], (None, None, ["stop"])),
    ("mistral", ["[TOOL_CALLS]", f"[{STOP}]"], ["[TOOL_CALLS]"], (None, None, ["stop"])),
    ("mistral_named", ["[TOOL_CALLS]", "stop", "[ARGS]", "{}"], ["[TOOL_CALLS]"], (None, None, ["stop"])),
    ("deepseek_r1_distill", ["why?", "</think>", "Hi."], [], ("Hi.", "why?", [])),
]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("case", SAID, ids=[f"{n}-{case[0]}" for n, case in enumerate(SAID)])
def test_parts_of_answers(
    case: tuple[str, list[str], list[str], tuple[str | None, str | None, list[str]]],
    stream: bool,
    tmp_path: Path,
) -> None:
    name, pieces, special, (content, reasoning, functions) = case
    tools = {} if name == "deepseek_r1_distill" else {"tools": TOOLS}

    async def run(client: openai.AsyncOpenAI) -> None:
        choice = await ask(client, stream, **tools)
        called = [function for function, _ in calls_of(choice)]
        assert called == functions
        assert choice.finish_reason == ("tool_calls" if functions else "stop")
        assert (choice.message.content or None) == ("".join(pieces) if "other" in pieces[-1] else content)
        assert getattr(choice.message, "reasoning_content", None) == reasoning
        again = [*HELLO, choice.message.model_dump(exclude_none=True)]
        again += [
            {"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in choice.message.tool_calls or []
        ]
        await ask(client, messages=[*again, *HELLO], **tools)  # what clients send back

    with_client(make_scripted(tmp_path, template(name), pieces, special), run)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "mistral"])
def test_tools_calls_and_results_reach_the_template(loaded: Callable[[str], Loaded], name: str) -> None:
    """The prompt has as many tokens as transformers' rendering of the conversation."""
    model = loaded(name)
    call = {"id": "abcdef123", "type": "function"}
    arguments = {"city": "Rome", "days": 2}
    talk = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "get_weather", "arguments": json.dumps(arguments)}}],
        },
        {"role": "tool", "tool_call_id": "abcdef123", "content": "sunny"},
    ]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=model.tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    fast.chat_template = template(name)
    plain = [
        *HELLO,
        {
            **talk[1],
            "content": "",
            "tool_calls": [{**call, "function": {"name": "get_weather", "arguments": arguments}}],
        },
        talk[2],
    ]
    prompt = fast.apply_chat_template(
        plain, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
    )

    async def run(client: openai.AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model="tiny", messages=talk, tools=TOOLS, max_tokens=1)

    assert with_client(model, run).usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("name", "fields", "param", "told"),
    [
        ("qwen3", {"tool_choice": "required"}, "tool_choice", "tools"),
        ("qwen3", {"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        ("qwen3", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ("qwen3", {"tools": [{"type": "web_search"}]}, "tools", "type"),
        (
            "qwen3",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}},
            "tool_choice",
            "none",
        ),
        (
            "qwen3",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "of f",
        ),
        (
            "qwen3",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
                "tool_choice": "required",
            },
            "tools",
            "of f",
        ),
        (
            "qwen3",
            {"extra_body": {"guided_regex": "(a"}},
            "guided_regex",
            "unclosed",
        ),
        ("llama3", {"tools": TOOLS}, "messages", "does not write tools"),
        ("qwen3_5_think", {"tools": TOOLS}, "tools", "cannot read"),
    ],
)
def test_what_is_not_possible_is_refused(
    loaded: Callable[[str], Loaded], name: str, fields: dict[str, Any], param: str, told: str
) -> None:
    async def run(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO, **fields)
        assert caught.value.param == param

    with_client(loaded(name), run)
