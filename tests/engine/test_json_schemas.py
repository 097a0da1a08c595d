"""Answers of a model with random weights follow JSON schemas: jsonschema finds every one valid."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deskside.engine.engine import Engine
from deskside.engine.sampling import Sampling
from tests.engine.json_schemas import Schema, hard_schemas, random_schemas
from tests.engine.test_generate import make
from tests.engine.test_grammar import asked, tokenizer, vocabulary

CONTEXT = 8192
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": CONTEXT,
}


def only_json(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


def problems(schema: Schema, text: str) -> list[str]:
    """Return what jsonschema finds wrong with the JSON of an answer. Raises ValueError for text that is not JSON."""
    value = json.loads(text, parse_constant=only_json)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return [error.message for error in validator.iter_errors(value)]


def check(schemas: list[Schema]) -> None:
    model = make(vocab_size=vocabulary(), **SMALL)
    engine = Engine(model, max_batch=32, max_tokens=32 * CONTEXT, tokenizer=tokenizer())
    requests = [
        asked("json", json.dumps(schema), sampling=Sampling(), seed=seed, max_new_tokens=CONTEXT - 10)
        for seed, schema in enumerate(schemas)
    ]
    for schema, (answer,) in zip(schemas, engine.run(requests), strict=True):
        assert answer.reason == "eos", (schema, answer.text[:200])
        assert not problems(schema, answer.text), (schema, answer.text)


def test_schemas() -> None:
    check(hard_schemas()[:8] + random_schemas(8, seed=1))


@pytest.mark.full
def test_two_hundred_schemas() -> None:
    hard = hard_schemas()
    check(hard + random_schemas(200 - len(hard), seed=0))
