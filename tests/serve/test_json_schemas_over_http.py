"""200 JSON schemas as response_format over HTTP: jsonschema finds every answer of random weights valid."""

import asyncio
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from deskside.weights.load import load_model
from tests.engine.json_schemas import Schema, hard_schemas, random_schemas
from tests.engine.test_generate import make
from tests.engine.test_json_schemas import CONTEXT, SMALL, problems
from tests.serve.chatty import make_chatty
from tests.serve.in_process import with_client

MAX_TOKENS = CONTEXT - 100


def check(schemas: list[Schema], folder: Path) -> None:
    """Check that all answers end by themselves, not at MAX_TOKENS, and are valid."""
    loaded = load_model(make_chatty(folder)[1])
    model = make(vocab_size=loaded.config.vocab_size, **SMALL)
    loaded = replace(loaded, model=model, config=model.config)

    async def ask(client: openai.AsyncOpenAI) -> list[tuple[str, str]]:
        async def one(seed: int, schema: Schema) -> tuple[str, str]:
            answer = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                seed=seed,
                max_tokens=MAX_TOKENS,
                response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            )
            return answer.choices[0].finish_reason, answer.choices[0].message.content or ""

        return await asyncio.gather(*(one(seed, schema) for seed, schema in enumerate(schemas)))

    answers = with_client(
        loaded,
        ask,
        max_choices=len(schemas),
        limits=(MAX_TOKENS, CONTEXT),
        max_batch=32,
        max_tokens=32 * CONTEXT,
    )
    results = list(zip(schemas, answers, strict=True))
    cut = [schema for schema, (reason, _) in results if reason != "stop"]
    assert not cut, f"{len(cut)} of {len(schemas)} answers did not end"
    invalid = [(schema, text) for schema, (_, text) in results if problems(schema, text)]
    assert not invalid, f"{len(invalid)} of {len(schemas)} answers are not valid"


@pytest.mark.full
def test_schemas(tmp_path: Path) -> None:
    check(hard_schemas()[3:6] + random_schemas(3, seed=1), tmp_path)


@pytest.mark.full
def test_two_hundred_schemas(tmp_path: Path) -> None:
    hard = hard_schemas()
    check(hard + random_schemas(200 - len(hard), seed=0), tmp_path)
