"""The API under requests generated from its own OpenAPI document, valid and invalid ones.

No request makes the server fail, every answer conforms to the document, everything that the document forbids is
refused, and concurrent clients get their own answers, complete and correct.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.serve_fuzz import MAX_TOKENS, SERVER, fuzz, main
from benchmarks.serve_load import Report, alone, load, questions, served
from tests.serve.chatty import make_chatty


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatty(tmp_path_factory.mktemp("fuzz"))[1]


@pytest.mark.full
def test_no_request_makes_the_server_fail(model: Path) -> None:
    """30 requests beside a client. The long form below has 10,000."""
    arguments = [str(model), "--device", "cpu", *SERVER]
    with served(arguments, {"OMP_NUM_THREADS": "1"}) as (base, pid), ThreadPoolExecutor(1) as thread:
        known = asyncio.run(alone(base, questions(3), {}))
        fuzzing = thread.submit(fuzz, base, 30, 1)
        beside = Report()
        while not fuzzing.done():
            beside.add(
                asyncio.run(load(base, pid, known, seconds=0.5, clients=range(1), long_answer=MAX_TOKENS))
            )
        found = fuzzing.result()
        paths = httpx.get(f"{base}/openapi.json").json()["paths"]
        assert httpx.get(f"{base}/health").json() == {"status": "ok"}
    assert found.problems == []
    assert (
        found.statuses.total() >= 30
        and found.cases >= 20
        and {200, 400} <= found.statuses.keys()
        and max(found.statuses) < 500
    )
    assert (beside.lost, beside.different.total(), beside.wrongly_taken) == (0, 0, 0), beside.problems
    assert beside.good > 0
    assert [list(methods) for methods in paths.values()].count(["post"]) == 6 and len(paths) == 11


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ten_thousand_cases_beside_64_clients(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    assert main([str(model), "--json", str(file)]) == 0
    numbers = json.loads(file.read_text())
    assert numbers["cases"] >= 10_000 and numbers["problems"] == []
    assert numbers["clients"] == 64 and numbers["beside"]["seconds"] == 300
    for clients in (numbers["beside"], numbers["afterwards"]):
        assert (clients["lost"], clients["different"], clients["wrongly_taken"]) == (0, 0, 0)
    assert numbers["beside"]["good"] > 1000
