"""Host time of `deskside serve` per answer: a server whose passes take a fixed time and always yield the same token.

    python -m benchmarks.serve_host RUN [--seconds 10] [--clients 64] [--pass-ms 0.5] [--json FILE]

A small model on a fast GPU is served as fast as Python can take requests, fill steps and write answers. This measures
that part alone, on any machine: the server runs on a CPU, and in place of the model's passes it sleeps. The clients ask
the questions of `benchmarks.serve_load`, half of them streamed, each on one connection. They are in this process and as
cheap as possible, because they may share the cores with the server.

For each thread of the server, the result has the processor time per answer: `event loop` is the main thread, `engine`
the one that fills and reads steps. Their sum bounds the rate, because only one of them can run Python at a time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.serve_load import Question, body_of, questions
from deskside.engine import engine, steps
from deskside.engine.requests import EngineStepOptions
from deskside.engine.steps import StepOutput

TOKEN = 65
PASS_SECONDS = "DESKSIDE_SERVE_HOST_PASS_SECONDS"  # in the environment of the server


class Uncaptured:
    """Runs steps without CUDA graphs, in place of `Graphs`."""

    def run(
        self, kind: Any, inputs: torch.Tensor, step: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return step(inputs)


def serve_with_a_fixed_pass(seconds: float, argv: Sequence[str]) -> int:
    """Run `deskside serve`, with passes that sleep for `seconds`."""

    def prefill(models: Any, slots: Any, prompts: Any, options: EngineStepOptions, blocks: Any) -> StepOutput:
        time.sleep(seconds)
        return StepOutput(torch.full((len(prompts.lanes_L), 1), TOKEN))

    def decode(
        models: Any, slots: Any, lanes_B: Any, bound: int, options: EngineStepOptions, num_tokens: int
    ) -> StepOutput:
        time.sleep(num_tokens * seconds)
        return StepOutput(torch.full((len(lanes_B), num_tokens), TOKEN))

    class SimulatedEngine(engine.Engine):
        """An engine that decodes several tokens at a time where it would on a GPU of this speed."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self._graphs, self._step_seconds = Uncaptured(), seconds  # type: ignore[assignment]

    steps.prefill, steps.decode = prefill, decode  # type: ignore[assignment]
    engine.Engine = SimulatedEngine  # type: ignore[misc]
    from deskside.cli.main import main as deskside

    return deskside(["serve", *argv])


@contextlib.contextmanager
def served(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Start the server, and yield its port and process id."""
    command = [sys.executable, "-m", "benchmarks.serve_host", options.model, "--device", "cpu", "--port", "0"]
    command += ["--max-batch", str(options.clients), "--concurrency", str(4 * options.clients)]
    environment = {**os.environ, PASS_SECONDS: str(options.pass_ms / 1e3), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+:(\d+)", process.stdout.readline())
        if address is None:
            raise RuntimeError("the server did not start")
        yield int(address[1]), process.pid
        process.terminate()


def thread_seconds(pid: int) -> dict[int, float]:
    """Return the processor time of each thread of a process so far, by its id. The main thread has the process's."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        user, system = stat.read_text().rpartition(")")[2].split()[11:13]
        seconds[int(stat.parent.name)] = (int(user) + int(system)) / ticks
    return seconds


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Question, stream: bool
) -> int:
    """Send a request and read the response. Return the number of its chunks. Raises RuntimeError if it is refused."""
    body = json.dumps(body_of(question, stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
    if " 200 " not in answer.partition("\r\n")[0]:
        raise RuntimeError(answer)
    if not stream:
        length = re.search(r"content-length: (\d+)", answer)
        assert length is not None
        await reader.readexactly(int(length[1]))
        return 0
    chunks = 0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
        chunks += 1
    await reader.readexactly(2)
    return chunks


async def load(port: int, seconds: float, clients: int) -> tuple[list[float], list[int]]:
    """Let clients ask for some seconds. Return the latencies in seconds, and the chunks of each streamed answer."""
    latencies: list[float] = []
    chunks: list[int] = []
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng, asked = random.Random(number), questions()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (began := time.monotonic()) < end:
            received = await ask(reader, writer, rng.choice(asked), rng.random() < 0.5)
            latencies.append(time.monotonic() - began)
            if received:
                chunks.append(received)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return sorted(latencies), chunks


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the results. Times in seconds; processor time per answer in milliseconds."""
    with served(options) as (port, pid):
        asyncio.run(load(port, 1, 8))
        before = thread_seconds(pid)
        latencies, chunks = asyncio.run(load(port, options.seconds, options.clients))
        used = {thread: now - before.get(thread, 0.0) for thread, now in thread_seconds(pid).items()}
    answers = len(latencies)
    main_thread = used.pop(pid)
    return {
        "clients": options.clients,
        "pass_ms": options.pass_ms,
        "answers_per_second": answers / options.seconds,
        "p50": latencies[answers // 2],
        "p99": latencies[int(0.99 * answers)],
        "chunks_per_stream": sum(chunks) / len(chunks),
        "event_loop_ms": main_thread / answers * 1e3,
        "engine_ms": max(used.values()) / answers * 1e3,
        "load_average": os.getloadavg()[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or its server."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if seconds := os.environ.get(PASS_SECONDS):
        return serve_with_a_fixed_pass(float(seconds), arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="a run, or a Hugging Face directory")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--pass-ms", type=float, default=0.5, help="time of a prefill, and of one token of decoding"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    results = measure(options)
    print("  ".join(f"{name} {value:.4g}" for name, value in results.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
