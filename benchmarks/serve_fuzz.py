"""Requests made from the OpenAPI document of `deskside serve`, beside clients whose answers are known.

    python -m benchmarks.serve_fuzz runs/chat --cases 10000 --seconds 300 --clients 64 [--seed N] [--json FILE]

schemathesis makes the requests: what the document allows and what it forbids. No request may make the server fail,
every response has to be one that the document describes, and what it forbids has to be refused. A request that is
turned away with 429 is not counted as a case. The clients of serve_load.py ask the same server for --seconds; after
that one of them goes on until the last case.
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

from benchmarks.serve_load import Report, alone, load, questions, served

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
TURNED_AWAY = 429
REFUSED = ["400", "404", "405", "413", "415"]  # what is forbidden gets one of these
PROCESSES = 4
ROUND = 200  # cases with one seed
# Short answers, all of them at once: on a CPU a step of a small model costs about the same for one row as for many.
MAX_TOKENS = 24
SERVER = ["--max-tokens", str(MAX_TOKENS), "--max-batch", "128", "--concurrency", "128"]


@dataclass
class Fuzzed:
    """What came of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Requests that were not turned away."""
        return self.statuses.total() - self.statuses[TURNED_AWAY]

    def add(self, other: "Fuzzed") -> None:
        """Count another round's requests too."""
        self.statuses += other.statuses
        self.problems += other.problems


def fuzz(base: str, cases: int, number: int) -> Fuzzed:
    """Send so many requests, made with this seed."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    # schemathesis's own list has no 413, which a list that is too long may well get, and takes any 5xx for a refusal.
    schema.config.checks.negative_data_rejection.expected_statuses = REFUSED
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    # Most of the cases go where most can go wrong.
    positive = [
        each.as_strategy(generation_mode=GenerationMode.POSITIVE) for each in [*operations, *posts * 3]
    ]
    negative = [each.as_strategy(generation_mode=GenerationMode.NEGATIVE) for each in posts * 4]
    found = Fuzzed()

    # Failures are gathered and not raised: the rest of the cases is sent too, and nothing is shrunk.
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
            found.problems.append(f"no response: {error!r}: {case.as_curl_command()}"[:2000])
            return
        found.statuses[response.status_code] += 1
        if response.status_code == TURNED_AWAY:
            return
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            found.problems += [f"{failure}: {case.as_curl_command()}"[:2000] for failure in group.exceptions]

    with requests.Session() as session:
        session.trust_env = False
        send()
    return found


def fuzz_all(base: str, cases: int, first: int, total: Fuzzed) -> None:
    """Send at least so many requests in rounds, and add each round to the total as it ends."""
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
            for each in done:
                found = each.result()
                total.add(found)
                print(*found.problems[:10], sep="\n", end="\n" * bool(found.problems), flush=True)
            statuses = dict(sorted(total.statuses.items()))
            print(
                f"{time.monotonic() - began:6.0f} s: {total.cases} cases, {statuses}, "
                f"{len(total.problems)} problems",
                flush=True,
            )


@dataclass
class Beside:
    """What the clients beside the fuzz saw: many of them at first, and one of them afterwards."""

    many: Report
    one: Report
    cases_beside_many: int


async def ask_beside(
    base: str, pid: int, total: Fuzzed, fuzzing: "Future[None]", seconds: float, clients: int
) -> Beside:
    """Ask until the fuzz ends, with all clients in the first seconds."""
    known = await alone(base, questions(), {})
    many = await load(base, pid, known, seconds=seconds, clients=clients, long_answer=MAX_TOKENS)
    so_far, one = total.cases, Report()
    print(f"{clients} clients, beside the first {so_far} cases:", *many.lines(), sep="\n", flush=True)
    while not fuzzing.done():
        one.add(await load(base, pid, known, seconds=2, clients=1, long_answer=MAX_TOKENS))
    return Beside(many, one, so_far)


def run(model: str, cases: int, seconds: float, clients: int, first: int) -> tuple[Fuzzed, Beside, float]:
    """Serve, fuzz and ask. Returns what came of it, and the seconds that the cases took."""
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
    """Run the script. Returns 0 when the server kept every promise."""
    parser = argparse.ArgumentParser(description="Fuzz deskside serve from its OpenAPI document.")
    parser.add_argument("model", help="a run, or a Hugging Face directory, with a chat template")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=300, help="that all clients ask")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next one has the next")
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
    wrong = any(each.lost or each.mixed or each.wrongly_taken for each in reports)
    return 1 if wrong or total.problems or max(total.statuses) >= 500 or beside.many.growth >= 64 else 0


if __name__ == "__main__":
    sys.exit(main())
