"""The API under requests that are made from its own OpenAPI document, valid ones and wrong ones.

No request makes the server fail, every answer is one that the document describes, what the document forbids is refused,
and a client beside it gets its own answers, whole and right.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.serve_load import alone, body_of, questions, served
from tests.serve.chatty import make_chatty

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = make_chatty(tmp_path_factory.mktemp("fuzz"))[1]
    arguments = [str(folder), "--device", "cpu", "--max-tokens", "64", "--name", "tiny"]
    with served(arguments, {"OMP_NUM_THREADS": "1"}) as (found, _):
        yield found


class Neighbour:
    """A client that asks the same questions again and again while others misbehave."""

    def __init__(self, base: str):
        asked = questions(6)
        self._base, self._known = base, asyncio.run(alone(base, asked, {}))
        self._stop = threading.Event()
        self.answers, self.wrong = 0, []

    def __enter__(self) -> "Neighbour":
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._work = self._pool.submit(self._ask)
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._work.result()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._base, timeout=60) as client:
            while not self._stop.is_set():
                for question, answer in self._known.items():
                    response = client.post("/v1/completions", json=body_of(question, False))
                    if response.status_code == 429:
                        continue
                    text = response.json()["choices"][0]["text"] if response.status_code == 200 else None
                    self.answers += 1
                    if text != answer:
                        self.wrong.append((question, response.status_code, text))


def fuzz(base: str, cases: int) -> dict[int, int]:
    """Send so many cases; returns how often each status was answered."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    assert len(operations) == 5 and len(posts) == 2
    counts: dict[int, int] = {}

    # Most of the cases go where most can go wrong.
    positive = [
        each.as_strategy(generation_mode=GenerationMode.POSITIVE) for each in [*operations, *posts * 3]
    ]
    negative = [each.as_strategy(generation_mode=GenerationMode.NEGATIVE) for each in posts * 4]
    every = st.one_of(*positive, *negative)

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=cases < 1000,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=every)
    def send(case: Case) -> None:
        response = case.call(base_url=base, timeout=60)
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        case.validate_response(response, checks=CHECKS)

    send()
    return counts


@pytest.mark.parametrize(
    "cases", [40, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_no_request_makes_the_server_fail(base: str, cases: int) -> None:
    with Neighbour(base) as neighbour:
        counts = fuzz(base, cases)
    assert sum(counts.values()) >= 0.9 * cases
    assert {200, 400} <= counts.keys() and max(counts) < 500
    assert neighbour.answers > 0 and neighbour.wrong == []
    assert httpx.get(f"{base}/health").json() == {"status": "ok"}
    print(f"{sum(counts.values())} cases: {counts}; {neighbour.answers} answers beside them")
