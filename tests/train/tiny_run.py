"""Runs small enough to train in a second, in this process, in a child that can be killed, or under torchrun.

Children are started by multiprocessing's fork server, which has already imported everything, so that killing many of
them costs no imports. They are real processes: signals and SIGKILL affect them as they affect `deskside train`.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import deskside
from deskside.config.run import RunConfig
from deskside.data.reading.loader import Batch
from deskside.run.directory import RunDirectory
from deskside.train import training_run
from deskside.train.loop.callbacks import Callback
from deskside.train.loop.step import StepMetrics, Stepper
from deskside.train.objective import RowDataset
from deskside.train.training_run import RunOutcome
from deskside.utils.signals import StopSignal

TEXT = "the river ran under a stone bridge while old ships waited for morning light and nobody spoke"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SMALLEST_PRESET = """
[model]
vocab_size = 300
num_hidden_layers = 1
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 64
max_position_embeddings = 64
[batch]
sequence_length = 32
tokens = 256
[compute]
device = "cpu"
attention = "reference"
"""
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def write_text(path: Path, lines: int = 600) -> None:
    rng, words = random.Random(0), TEXT.split()
    path.write_text("".join(" ".join(rng.choices(words, k=rng.randint(4, 14))) + ".\n" for _ in range(lines)))


def settings(prepared: Path | str, /, **changes: Any) -> dict[str, Any]:
    """Return a configuration as plain data. `changes` are sections such as
    schedule={"length": 30}, merged key by key.
    """
    parts: dict[str, Any] = {
        "model": dict(SHAPE),
        "data": {"path": str(prepared)},
        "optim": {"name": "muon"},
        "batch": {"sequence_length": 32, "tokens": 256},
        "schedule": {"name": "wsd", "length": "60 steps"},
        "compute": {"device": "cpu", "attention": "reference"},
        "checkpoint": {"every": "10 steps"},
        "evaluate": {"every": None, "tokens": 500},
    }
    for name, value in changes.items():
        parts[name] = {**parts.get(name, {}), **value} if isinstance(value, dict) else value
    return parts


def config(prepared: Path | str, /, **changes: Any) -> RunConfig:
    return RunConfig.model_validate(settings(prepared, **changes))


class VirtualTime:
    """A replacement for `time.perf_counter` that advances with each step, and by a microsecond with each call.

    Tests therefore do not depend on the machine's speed. `seconds_of(step)` is the duration of a
    step; a dry step takes as long as step 1.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float]):
        self.now = 0.0
        original = Stepper.run

        def run(stepper: Stepper, batches: list[Batch], step: int, dry: bool = False) -> StepMetrics:
            self.now += seconds_of(step)
            return original(stepper, batches, step, dry)

        monkeypatch.setattr(Stepper, "run", run)
        monkeypatch.setattr(time, "perf_counter", self.look)

    def look(self) -> float:
        self.now += 1e-6
        return self.now


class StopAfter(Callback):
    """Training callback that stops a run after a step, as a signal does."""

    def __init__(self, step: int):
        self.step = step

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        self.stop = stop

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if row["step"] >= self.step:
            self.stop.requested = "SIGTERM"


def train(root: Path, config: RunConfig, name: str = "run", **given: Any) -> RunOutcome:
    """Train a new run in this process."""
    deskside.STARTED = time.perf_counter()
    return training_run.start(config, (root, name, "run"), "a test", **given)


def resume(run: Path) -> RunOutcome:
    """Resume a run in this process. New memory is NaN, so that nothing can depend on what a tensor held before."""
    deskside.STARTED = time.perf_counter()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return training_run.resume(run)
    finally:
        torch.use_deterministic_algorithms(before)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def curve(run: Path) -> list[tuple[int, int, float, float, float]]:
    """Return what must be bitwise equal: step, tokens, lr, loss and gradient norm of every step in order."""
    return [(r["step"], r["tokens"], r["lr"], r["loss"], r["grad_norm"]) for r in rows(run)]


def events(run: Path) -> str:
    return (run / "events.log").read_text("utf-8")


def plan(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "plan.json").read_text("utf-8")))


def checkpoints(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


# Children of the fork server


def _child(kind: str, argument: Any, environment: dict[str, str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    deskside.STARTED = time.perf_counter()
    if kind == "command":
        from deskside.cli.main import main

        sys.exit(main(argument))
    function, *arguments = argument
    function(*arguments)


@dataclass
class Child:
    """Processes that were started together (one, or one for each rank), and the file with their output."""

    log: Path
    processes: list[BaseProcess] = field(default_factory=list)

    def kill(self, number: int = signal.SIGKILL) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def wait(self, seconds: float = 120) -> int:
        """Wait for the end, and return the exit code (the largest by size), which is negative for a signal."""
        for process in self.processes:
            process.join(seconds)
            assert process.exitcode is not None, f"still running: {self.text()}"
        return max((p.exitcode or 0 for p in self.processes), key=abs)

    def alive(self) -> bool:
        return any(p.is_alive() for p in self.processes)

    def text(self) -> str:
        return self.log.read_text("utf-8", errors="replace") if self.log.exists() else ""


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["deskside.cli.train", "deskside.train.training_run", "deskside.report.write", "transformers"]
    )
    return context


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start(kind: str, argument: Any, log: Path, ranks: int = 1) -> Child:
    context = _context()
    port = str(free_port())
    child = Child(log)
    for rank in range(ranks):
        environment = dict(ONE_THREAD)
        if ranks > 1:
            environment |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = context.Process(target=_child, args=(kind, argument, environment, str(log)))
        with _environment(ONE_THREAD):  # the fork server starts with the first process
            process.start()
        child.processes.append(process)
    return child


def command(argv: list[str], log: Path, ranks: int = 1) -> Child:
    """Run `deskside ARGV` in a child process."""
    return _start("command", argv, log, ranks)


def call(function: Callable[..., object], *arguments: object, log: Path, ranks: int = 1) -> Child:
    """Call a function of a test file in a child process (for each rank)."""
    return _start("call", (function, *arguments), log, ranks)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# Real commands in new processes


def program(argv: list[str], log: Path, ranks: int = 1) -> "subprocess.Popen[bytes]":
    """Start `python -m deskside ARGV`, under torchrun for more than one rank, in a new session."""
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += [
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            str(free_port()),
            "-m",
        ]
    with log.open("ab") as file:
        return subprocess.Popen(
            [*start, "deskside", *argv],
            stdout=file,
            stderr=file,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,
        )


def descendants(pid: int) -> list[int]:
    """Return the process and all its descendants, parents first (Linux)."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(p) for p in task.read_text().split()]
    return found


def kill_at_step(run: Path, step: int, kill: Callable[[], None], alive: Callable[[], bool]) -> int:
    """Call `kill` once metrics.jsonl shows `step`, and return the last step seen. The run must not end before."""
    last = 0
    deadline = time.monotonic() + 120
    while last < step:
        assert time.monotonic() < deadline and alive(), f"the run ended or hung before step {step}"
        time.sleep(0.001)
        last = (rows(run) or [{"step": 0}])[-1]["step"]
    kill()
    return last
