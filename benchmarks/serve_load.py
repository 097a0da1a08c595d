"""Load test of `deskside serve` with many clients, some of which disconnect or send malformed requests.

    python benchmarks/serve_load.py runs/go --seconds 300 --clients 64 [--json FILE]

The benchmark starts the server, sends every prompt once in isolation with greedy decoding, and then lets all clients
send requests concurrently. Each answer must equal the one that its prompt received in isolation, or it counts as
`different`. On a GPU in BF16, a step over many rows rounds differently from a step over one row, so an answer can
differ where two tokens are almost equally probable. After the load, the server tells how much less probable the first
differing token is for that prompt in isolation. If this is more than CLOSE, the answer is `wrong`, for example that of
another client. A request without a complete answer is `lost`. Memory is the resident set of the server, which must not
grow after the first quarter.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

Question = tuple[str, int]  # prompt, tokens of the answer
# Nats between two tokens, below which rounding can choose either. Logits of about 10 have steps of 1/16 in BF16, and
# two of them enter a difference.
CLOSE = 0.25
MALFORMED = (
    b"",
    b"{",
    b'{"prompt": ' + b"[" * 5000,
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "nobody_knows_this": 1}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "a", "n": 100000}',
    b'{"messages": 7}',
)


@dataclass
class Report:
    """Results of the clients. Latencies in seconds, of complete correct answers; memory in MiB.

    `different` counts each answer to a question, and `gaps` has what `token_gap` says of it, in nats.
    """

    seconds: float = 0.0
    good: int = 0
    lost: int = 0
    different: Counter[tuple[Question, str]] = field(default_factory=Counter)
    gaps: dict[tuple[Question, str], float] = field(default_factory=dict)
    hung_up: int = 0
    refused: int = 0  # malformed requests refused with a 4xx
    wrongly_taken: int = 0  # malformed requests accepted
    turned_away: int = 0  # 429, sent again
    latencies: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        """Return a percentile of the latencies."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def growth(self) -> float:
        """MiB by which the median memory of the last quarter exceeds that of the second quarter."""
        if len(self.memory) < 4:
            return 0.0
        quarter = len(self.memory) // 4
        return statistics.median(self.memory[-quarter:]) - statistics.median(
            self.memory[quarter : 2 * quarter]
        )

    @property
    def wrong(self) -> int:
        """Number of different answers that rounding does not explain, or that are not yet explained."""
        return sum(n for answer, n in self.different.items() if self.gaps.get(answer, math.inf) > CLOSE)

    def add(self, other: "Report") -> None:
        """Add the results of other clients, before `gaps` are known."""
        for report_field in fields(self):
            name = report_field.name
            if name != "gaps":
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def numbers(self) -> dict[str, Any]:
        """Return the counts, with percentiles instead of the latencies."""
        left_out = ("latencies", "memory", "different", "gaps")
        numbers = {key: value for key, value in vars(self).items() if key not in left_out}
        numbers |= {"different": self.different.total(), "wrong": self.wrong}
        numbers["differences"] = [
            {
                "question": answer[0],
                "answer": answer[1],
                "times": count,
                "gap": gap if math.isfinite(gap) else None,
            }
            for answer, count in self.different.most_common()
            for gap in [self.gaps.get(answer, math.inf)]
        ]
        if self.latencies:
            numbers |= {"p50": self.percentile(0.5), "p99": self.percentile(0.99)}
        if self.memory:
            numbers |= {"memory_mib": [self.memory[0], self.memory[-1]], "growth_mib": self.growth}
        return numbers

    def lines(self) -> list[str]:
        """Return the results as text."""
        if not self.latencies or not self.memory:
            return ["no good answers", *self.problems[:5]]
        return [
            f"{self.good} good answers in {self.seconds:.0f} s ({self.good / self.seconds:.1f} a second), "
            f"p50 {self.percentile(0.5):.3f} s, p99 {self.percentile(0.99):.3f} s",
            f"{self.lost} lost, {self.different.total()} different by at most {max(self.gaps.values(), default=0):.3f} "
            f"nats, of which {self.wrong} wrong",
            f"{self.hung_up} hung up, {self.refused} malformed and refused, {self.wrongly_taken} malformed and taken, "
            f"{self.turned_away} turned away with 429",
            f"memory {self.memory[0]:.0f} MiB at first, {self.memory[-1]:.0f} MiB at last, "
            f"{self.growth:+.1f} MiB from the second quarter to the last",
            *self.problems[:5],
        ]


@contextlib.contextmanager
def served(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """Start a server on a free port, and yield its address and process id. On exit, SIGTERM must end it with 0."""
    command = [sys.executable, "-m", "deskside", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        if address is None:
            raise RuntimeError(f"the server did not start: {line!r}")
        yield address.group(), process.pid
        process.terminate()
        if process.wait(timeout=60) != 0:
            raise RuntimeError(f"the server ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def resident(pid: int) -> float:
    """Return the resident set of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def questions(count: int = 48) -> list[Question]:
    """Return prompts that share prefixes of many lengths, with answers of many lengths."""
    rng = random.Random(1)
    words = re.findall(
        r"\w+", "the ship went to sea and sailors sang of ships all day long while gulls slept"
    )
    system = " ".join(rng.choice(words) for _ in range(60))
    prompts = []
    for number in range(count):
        ending = " ".join(rng.choice(words) for _ in range(rng.randint(1, 40)))
        prompts.append((f"{system if number % 3 == 0 else ''} {number} {ending}", rng.randint(4, 24)))
    return prompts


def body_of(question: Question, stream: bool) -> dict[str, object]:
    """Return the body of a request for a question, with greedy decoding."""
    prompt, tokens = question
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}


async def alone(base: str, asked: Sequence[Question], headers: Mapping[str, str]) -> dict[Question, str]:
    """Return the answers without concurrent load."""
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=120) as client:
        answers = {}
        for question in asked:
            response = await client.post("/v1/completions", json=body_of(question, False))
            response.raise_for_status()
            answers[question] = str(response.json()["choices"][0]["text"])
        return answers


async def load(
    base: str,
    pid: int,
    known: Mapping[Question, str],
    *,
    seconds: float,
    clients: Iterable[int] = range(64),
    headers: Mapping[str, str] | None = None,
    hang_ups: float = 0.12,
    nonsense: float = 0.12,
    long_answer: int = 400,
) -> Report:
    """Let all clients send requests for some seconds, and return their results.

    clients: their numbers, which seed their choices. hang_ups, nonsense: share of disconnecting and of malformed
    requests; long_answer: tokens of an answer that a client does not wait for.
    """
    report = Report(seconds=seconds)
    end = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < end:
            report.memory.append(resident(pid))
            await asyncio.sleep(max(0.1, seconds / 200))

    async def client_loop(number: int) -> None:
        rng = random.Random(number)
        limits = httpx.Limits(max_connections=2, max_keepalive_connections=1)
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=120, limits=limits) as client:
            while time.monotonic() < end:
                draw = rng.random()
                try:
                    if draw < hang_ups:
                        await _hang_up(client, rng, known, report, long_answer)
                    elif draw < hang_ups + nonsense:
                        await _nonsense(client, rng, report)
                    else:
                        await _ask(client, rng, known, report)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    report.lost += 1
                    report.problems.append(f"{type(error).__name__}: {error}")

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client_loop(number) for number in clients))
    await watching
    return report


async def _ask(
    client: httpx.AsyncClient, rng: random.Random, known: Mapping[Question, str], report: Report
) -> None:
    question = rng.choice(list(known))
    began = time.monotonic()
    text = None
    while text is None:
        text = await (_whole if rng.random() < 0.5 else _streamed)(client, question)
        if text is None:
            report.turned_away += 1
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            began = time.monotonic()
    report.latencies.append(time.monotonic() - began)
    if text == known[question]:
        report.good += 1
        return
    report.different[question, text] += 1


async def explain(base: str, report: Report, headers: Mapping[str, str] | None = None) -> None:
    """Set the report's `gaps`: ask each question again in isolation, with the probabilities of tokens."""
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=120) as client:
        for question, text in report.different:
            body = {**body_of(question, False), "logprobs": 5}
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            gap = token_gap(response.json()["choices"][0], text)
            report.gaps[question, text] = gap
            if gap > CLOSE:
                report.problems.append(f"{question!r}: {text!r}, {gap:.3f} nats less probable")


def token_gap(choice: Mapping[str, Any], text: str) -> float:
    """Return by how many nats the first token in which `text` differs is less probable than the one of `choice`.

    choice: an answer with its log-probabilities. The result is infinite if no probable token leads to `text`.
    """
    logprobs = choice["logprobs"]
    starts = [offset - logprobs["text_offset"][0] for offset in logprobs["text_offset"]]
    for number in reversed(range(len(starts))):
        if text[: starts[number]] != choice["text"][: starts[number]]:
            continue
        rest = text[starts[number] :]
        chosen, alternatives = logprobs["tokens"][number], logprobs["top_logprobs"][number]
        # Several tokens can begin the rest of the text; the longest is what a tokenizer would have written. A text that
        # has no rest was ended by a special token, such as <|endoftext|>.
        possible = [
            token
            for token in alternatives
            if token and token != chosen and (rest.startswith(token) if rest else re.fullmatch("<.*>", token))
        ]
        if possible:
            return float(logprobs["token_logprobs"][number] - alternatives[max(possible, key=len)])
    return math.inf


async def _whole(client: httpx.AsyncClient, question: Question) -> str | None:
    response = await client.post("/v1/completions", json=body_of(question, False))
    if response.status_code == 429:
        assert int(response.headers["retry-after"]) > 0
        return None
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


async def _streamed(client: httpx.AsyncClient, question: Question) -> str | None:
    parts: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body_of(question, True)) as response:
        if response.status_code == 429:
            await response.aread()
            return None
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "".join(parts)
            if line:
                parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    raise ValueError(f"a stream without its end: {parts}")


async def _hang_up(
    client: httpx.AsyncClient,
    rng: random.Random,
    known: Mapping[Question, str],
    report: Report,
    tokens: int,
) -> None:
    """Request a long answer and disconnect, after a moment or after the first chunk."""
    prompt, _ = rng.choice(list(known))
    if rng.random() < 0.5:
        with contextlib.suppress(httpx.TimeoutException):
            await client.post(
                "/v1/completions", json=body_of((prompt, tokens), False), timeout=rng.uniform(0.01, 0.2)
            )
    else:
        async with client.stream("POST", "/v1/completions", json=body_of((prompt, tokens), True)) as response:
            async for _ in response.aiter_lines():
                break
    report.hung_up += 1


async def _nonsense(client: httpx.AsyncClient, rng: random.Random, report: Report) -> None:
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    content = rng.choice(MALFORMED)
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    if 400 <= response.status_code < 500 and response.json()["error"]["message"]:
        report.refused += 1
    else:
        report.wrongly_taken += 1
        report.problems.append(f"{content[:60]!r}: {response.status_code}")


def _load_from_processes(
    base: str, pid: int, known: Mapping[Question, str], options: argparse.Namespace, seconds: float
) -> Report:
    """Run the clients in several processes: one cannot send as many requests as a server can answer."""
    processes = min(options.processes, options.clients)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running = [
            pool.submit(
                _load_in_process,
                base,
                pid,
                dict(known),
                seconds,
                range(n, options.clients, processes),
            )
            for n in range(processes)
        ]
        report, *others = [future.result() for future in running]
    for other in others:  # they watched the same memory
        report.add(replace(other, seconds=0.0, memory=[]))
    return report


def _load_in_process(
    base: str, pid: int, known: dict[Question, str], seconds: float, clients: range
) -> Report:
    return asyncio.run(load(base, pid, known, seconds=seconds, clients=clients))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script. Return 0 if no answer was lost or wrong and memory did not grow."""
    parser = argparse.ArgumentParser(description="Load test of deskside serve.")
    parser.add_argument("model", help="a run, or a Hugging Face directory")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--warm-up",
        type=float,
        default=0,
        help="seconds of load before; on a GPU, most CUDA graphs are captured then",
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="of the clients"
    )
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(argv)
    serve = [options.model, "--max-batch", str(options.max_batch)]
    with served(serve) as (base, pid):
        known = asyncio.run(alone(base, questions(), {}))
        if options.warm_up:
            _load_from_processes(base, pid, known, options, options.warm_up)
        report = _load_from_processes(base, pid, known, options, options.seconds)
        asyncio.run(explain(base, report))
    print("\n".join(report.lines()))
    if options.json is not None:
        numbers = {**report.numbers(), "clients": options.clients, "warm_up": options.warm_up}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
    return 0 if not (report.lost or report.wrong or report.wrongly_taken) and report.growth < 64 else 1


if __name__ == "__main__":
    sys.exit(main())
