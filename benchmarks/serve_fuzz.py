"""Fuzz test of `deskside serve` from its OpenAPI document, with concurrent clients whose answers are known.

    python -m benchmarks.serve_fuzz runs/chat --cases 10000 --seconds 300 --clients 64 [--seed N] [--json FILE]

schemathesis generates requests that the document allows and requests that it forbids. No request may make the server
fail, every response must be one that the document describes, and forbidden requests must be refused. A request that is
rejected with 429 does not count as a case. The clients of serve_load.py use the same server for --seconds; after that,
one of them continues until the last case.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.serve_load import Report, alone, explain, load, questions, served

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
TOO_MANY_REQUESTS = 429
REFUSED = ["400", "404", "405", "413", "415"]  # allowed responses to forbidden requests
PROCESSES = 4
ROUND = 200  # cases per seed
# Short answers, all in one batch: on a CPU, a step of a small model costs about the same for one row as for many.
MAX_TOKENS = 24
SERVER = ["--max-tokens", str(MAX_TOKENS), "--max-batch", "128", "--concurrency", "128"]


@dataclass
class Fuzzed:
    """Results of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Number of requests that were not rejected with 429."""
        return self.statuses.total() - self.statuses[TOO_MANY_REQUESTS]

    def add(self, other: "Fuzzed") -> None:
        """Add the requests of another round."""
        self.statuses += other.statuses
        self.problems += other.problems


def fuzz(base: str, cases: int, number: int) -> Fuzzed:
    """Send `cases` requests, generated with the seed `number`."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    # schemathesis's default list lacks 413, which is correct for a list that is too long, and accepts any 5xx.
    schema.config.checks.negative_data_rejection.expected_statuses = REFUSED
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    # Most cases are POST requests, where most can go wrong.
    positive = [
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        for operation in [*operations, *posts * 3]
    ]
    negative = [operation.as_strategy(generation_mode=GenerationMode.NEGATIVE) for operation in posts * 4]
    result = Fuzzed()

    # Failures are collected and not raised, so that all cases are sent and nothing is shrunk.
    @seed(number)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(*positive, *negative))
    def send(case: Case) -> None:
        try:
            response = case.call(base_url=base, session=session, timeout=120)
        except requests.RequestException as error:
            result.problems.append(f"no response: {error!r}: {case.as_curl_command()}"[:2000])
            return
        result.statuses[response.status_code] += 1
        if response.status_code == TOO_MANY_REQUESTS:
            return
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            result.problems += [f"{failure}: {case.as_curl_command()}"[:2000] for failure in group.exceptions]

    with requests.Session() as session:
        session.trust_env = False
        send()
    return result


def fuzz_all(base: str, cases: int, first: int, total: Fuzzed) -> None:
    """Send at least `cases` requests in rounds with seeds from `first`, and add each round to the total at its end."""
    began = time.monotonic()
    seeds = itertools.count(first)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Fuzzed]] = set()
        while True:
            while len(running) < PROCESSES and total.cases + ROUND * len(running) < cases:
                running.add(pool.submit(fuzz, base, ROUND, next(seeds)))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                total.add(result)
                print(*result.problems[:10], sep="\n", end="\n" * bool(result.problems), flush=True)
            statuses = dict(sorted(total.statuses.items()))
            print(
                f"{time.monotonic() - began:6.0f} s: {total.cases} cases, {statuses}, "
                f"{len(total.problems)} problems",
                flush=True,
            )


@dataclass
class Beside:
    """Results of the clients during the fuzz test: many of them at first, then a single one."""

    many: Report
    one: Report
    cases_beside_many: int


async def ask_beside(
    base: str, pid: int, total: Fuzzed, fuzzing: "Future[None]", seconds: float, clients: int
) -> Beside:
    """Send questions until the fuzz test ends, with all clients in the first seconds."""
    known = await alone(base, questions(), {})
    many = await load(base, pid, known, seconds=seconds, clients=range(clients), long_answer=MAX_TOKENS)
    await explain(base, many)
    so_far, one = total.cases, Report()
    print(f"{clients} clients, beside the first {so_far} cases:", *many.lines(), sep="\n", flush=True)
    while not fuzzing.done():
        one.add(await load(base, pid, known, seconds=2, clients=range(1), long_answer=MAX_TOKENS))
    await explain(base, one)
    return Beside(many, one, so_far)


def run(model: str, cases: int, seconds: float, clients: int, first: int) -> tuple[Fuzzed, Beside, float]:
    """Start a server, fuzz it and send questions. Return both results and the seconds that the cases took."""
    total = Fuzzed()
    began = time.monotonic()
    with served([model, *SERVER]) as (base, pid), ThreadPoolExecutor(1) as thread:
        fuzzing = thread.submit(fuzz_all, base, cases, first, total)
        ended: list[float] = []
        fuzzing.add_done_callback(lambda _: ended.append(time.monotonic() - began))
        beside = asyncio.run(ask_beside(base, pid, total, fuzzing, seconds, clients))
        fuzzing.result()
        if httpx.get(f"{base}/health").json() != {"status": "ok"}:
            total.problems.append("the server is not healthy after the last case")
    return total, beside, ended[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script. Return 0 if the server behaved correctly."""
    parser = argparse.ArgumentParser(description="Fuzz deskside serve from its OpenAPI document.")
    parser.add_argument("model", help="a run, or a Hugging Face directory, with a chat template")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument(
        "--seconds", type=float, default=300, help="seconds during which all clients send requests"
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first round; each round increments it"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(argv)
    total, beside, took = run(options.model, options.cases, options.seconds, options.clients, options.seed)
    statuses = {str(status): count for status, count in sorted(total.statuses.items())}
    print(f"{total.cases} cases in {took:.0f} s: {statuses}; {len(total.problems)} problems")
    print("one client, beside the rest:", *beside.one.lines(), sep="\n")
    if options.json is not None:
        numbers = {
            "seed": options.seed,
            "cases": total.cases,
            "seconds": took,
            "statuses": statuses,
            "problems": total.problems,
            "clients": options.clients,
            "cases_beside_clients": beside.cases_beside_many,
            "beside": beside.many.numbers(),
            "afterwards": beside.one.numbers(),
        }
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
    reports = (beside.many, beside.one)
    wrong = any(report.lost or report.wrong or report.wrongly_taken for report in reports)
    return 1 if wrong or total.problems or max(total.statuses) >= 500 or beside.many.growth >= 64 else 0


if __name__ == "__main__":
    sys.exit(main())
