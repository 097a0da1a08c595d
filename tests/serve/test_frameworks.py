"""LangChain and LiteLLM as clients of the server, with tools and structured output.

Their packages take seconds to import, so only the process that runs these tests imports them, not all that collect.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, Field

from benchmarks.serve_load import served
from tests.data.chat.templates import template
from tests.serve.made_run import make
from tests.serve.test_tools import TOOLS

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI


class Ship(BaseModel):
    """A ship."""

    name: str = Field(max_length=6)
    tons: int = Field(ge=1, le=99)
    kind: Literal["boat", "ferry"]


def sail(days: Literal[1, 2, 3], fast: bool) -> str:
    """Sail for some days."""
    return f"{days} {fast}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with random weights and Qwen 2.5's template, which supports tools."""
    made = make(tmp_path_factory.mktemp("frameworks")).path
    path = Path(shutil.copytree(made, made.parent / "qwen"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (path / "chat_template.jinja").write_text(template("qwen2_5"), "utf-8")
    arguments = [str(path), "--device", "cpu", "--max-tokens", "2000", "--name", "tiny"]
    with served(arguments, {"OMP_NUM_THREADS": "1"}) as (address, _):
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def chain(base: str) -> "ChatOpenAI":
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="tiny", base_url=base, api_key="-", max_retries=0, timeout=120, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chain: "ChatOpenAI", method: str) -> None:
    ship = chain.with_structured_output(Ship, method=method).invoke("A ship, please")
    assert isinstance(ship, Ship)


@pytest.mark.full
def test_langchain_json_mode(chain: "ChatOpenAI") -> None:
    """Random weights do not know the fields, so the test only checks that the answer is an object."""
    answer = chain.bind(response_format={"type": "json_object"}, n=1, max_tokens=600).invoke("A ship")
    assert str(answer.content).startswith("{")


@pytest.mark.full
def test_langchain_tools(chain: "ChatOpenAI") -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    sailing = tool(sail)
    bound = chain.bind_tools([sailing], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke("Sail!")
    (call,) = answer.tool_calls
    assert call["name"] == "sail" and set(call["args"]) == {"days", "fast"} and not answer.invalid_tool_calls
    streamed: Any = None
    for chunk in bound.stream("Sail!"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    result = ToolMessage(sailing.invoke(call["args"]), tool_call_id=call["id"])
    after = chain.bind_tools([sailing]).invoke([HumanMessage("Sail!"), answer, result], max_tokens=8)
    assert isinstance(after, AIMessage)


@pytest.mark.full
def test_litellm_structured_output_and_tools(base: str) -> None:
    import litellm

    common: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": base,
        "api_key": "-",
        "seed": 1,
        "num_retries": 0,
    }
    messages = [{"role": "user", "content": "A ship"}]
    answer = litellm.completion(**common, messages=messages, response_format=Ship)
    Ship.model_validate_json(answer.choices[0].message.content)
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(**common, messages=messages, **options)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.name in ("get_weather", "stop") and isinstance(
        json.loads(call.function.arguments), dict
    )
    pieces = [
        delta.function.arguments
        for chunk in litellm.completion(**common, messages=messages, **options, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(piece or "" for piece in pieces) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = litellm.completion(**common, messages=[*messages, message, result], tools=TOOLS, max_tokens=8)
    assert after.choices[0].finish_reason in ("length", "stop", "tool_calls")
