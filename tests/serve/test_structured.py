"""Constrained answers of the server: OpenAI's response_format and vLLM's fields, through the official client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import validate
from pydantic import BaseModel, Field

from benchmarks.serve_load import served
from tests.serve.chatty import make_chatty

HELLO: list = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ship", "sea"]},
        "length": {"type": "integer", "minimum": 3, "maximum": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "length", "tags"],
    "additionalProperties": False,
}


CHAIN_OF_RULES = "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(9000)) + '\nr9000: "b"'
CHAIN_OF_REFS = {
    "$ref": "#/$defs/0",
    "$defs": {
        **{
            str(n): {"properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}, "required": ["a"]}
            for n in range(3000)
        },
        "3000": {"type": "string"},
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path: Path = make_chatty(tmp_path_factory.mktemp("structured"))[1]
    arguments = [str(path), "--device", "cpu", "--max-tokens", "3000", "--name", "tiny"]
    with served(arguments, {"OMP_NUM_THREADS": "1"}) as (base, _):
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2000, **fields)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def schema_format(schema: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **other}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_is_followed(client: openai.OpenAI, stream: bool, strict: bool) -> None:
    asked = schema_format(SCHEMA, strict=strict, description="a ship")
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, seed=seed, response_format=asked, stream=stream
        )
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
        validate(json.loads(text), SCHEMA)


def test_parsed_by_the_client(client: openai.OpenAI) -> None:
    class Ship(BaseModel):
        name: str = Field(max_length=8)
        tons: float = Field(ge=1, le=99)
        sails: bool

    answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Ship)
    ship = answer.choices[0].message.parsed
    assert ship is not None and 1 <= ship.tons <= 99 and len(ship.name) <= 8


def test_choices_of_one_request_differ_and_all_follow(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, n=6, seed=1, response_format=schema_format(SCHEMA)
    )
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


def test_completions_are_constrained_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=500, extra_body={"response_format": schema_format(SCHEMA)}
    )
    for choice in answer.choices:
        validate(json.loads(choice.text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]+"}}, "[0-9]{3}-[a-f]+"),
        ({"guided_regex": "(sea|ship){2}"}, "(sea|ship){2}"),
        ({"structured_outputs": {"choice": ["to sea", "東京"]}}, "to sea|東京"),
        ({"guided_choice": ["positive", "negative"]}, "positive|negative"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
        ({"guided_grammar": 'start: "a" /[0-9]/ "b"'}, "a[0-9]b"),
        ({"structured_outputs": {"json": {"enum": [1, 20]}}}, "1|20"),
        ({"guided_json": '{"enum": [1, 20]}'}, "1|20"),
    ],
)
def test_fields_of_vllm(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, ask(client, extra_body=fields))


def test_any_json_object(client: openai.OpenAI) -> None:
    """Some answers of random weights would exceed the limit, so the request asks for short ones: no new fields."""
    bias = {"structured_outputs": {"json_object": True}}
    for fields in ({"response_format": {"type": "json_object"}}, {"extra_body": bias}):
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, n=8, seed=1, max_tokens=300, **fields
        )
        whole = [c.message.content for c in answer.choices if c.finish_reason == "stop"]
        assert whole and all(isinstance(json.loads(text), dict) for text in whole)
        assert all(c.message.content.startswith("{") for c in answer.choices)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": schema_format({"not": {}})}, "response_format", "not"),
        ({"response_format": schema_format({"type": "ship"})}, "response_format", "ship"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": schema_format({}, rules=1)}, "response_format", "rules"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs", "lark"),
        ({"guided_grammar": "nothing"}, "guided_grammar", "nothing"),
        ({"guided_json": "[" * 100_000}, "guided_json", "nested"),
        # A chain of rules does not overflow the stack.
        ({"guided_grammar": CHAIN_OF_RULES, "max_tokens": 99999}, "max_tokens", "exceeds"),
        ({"guided_json": CHAIN_OF_REFS, "max_tokens": 99999}, "max_tokens", "exceeds"),
        ({"guided_regex": "(?:a?){500}a{500}"}, "grammar", "too many"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format",
        ),
    ],
)
def test_what_is_not_possible_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body=fields)
    assert caught.value.param == param
    assert "\n" not in caught.value.message
