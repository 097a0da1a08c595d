"""Kill training, alignment, studies, `go` and data preparation many times, and compare with uninterrupted runs.

    python -m benchmarks.kills --seed 1 --kills 200 --out docs/data/DATE-kills/kills.json [--only train sft]

The models have a few thousand parameters and run on one CPU thread, or with `--device cuda` on a GPU. `experts`
trains a mixture of experts with optimizer states and activations in host memory. Half of the kills happen at a random
time, the others at a random moment of writing a file (`kill_points`). After a kill, the command is resumed and
perhaps killed again. After two to five kills it runs to its end. Then

- the curve (step, tokens, learning rate, loss, gradient norm) and the final weights must be bit-identical to those of
  the run without kills; for a study, the curves of all trials; for prepared data, every byte;
- `go` uses the real clock, so its number of steps varies: every step must occur once, and the pipeline must finish;
- a run must not resume from before the newest complete checkpoint that existed when it was killed.

The result is JSON with every kill and every trial. The exit code is 1 if anything was lost or differs.
"""

import argparse
import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.kill_commands import Command, make_commands
from benchmarks.kill_points import POINTS, KillPoints

# Kills of each command among 100. The last two start child processes, which takes long.
SHARES = {"train": 16, "experts": 10, "sft": 17, "dpo": 13, "grpo": 13, "data": 21, "study": 5, "go": 5}
TIMEOUT_SECONDS = 600.0  # time limit of a command that is not killed
MAX_STARTS = 40  # per trial, so that a command that makes no progress is reported


@dataclass
class Kill:
    """One kill. how: "time" or the kind of a kill point (`kill_points.POINTS`); file: the file written at it.

    background: at a kill point, whether a thread beside training was writing the file.
    """

    command: str
    trial: int
    how: str
    after_seconds: float
    file: str | None
    background: bool
    unfinished_files: list[str]
    newest_checkpoint: int | None

    @property
    def during_write(self) -> bool:
        return self.how in ("fsync", "replace") or bool(self.unfinished_files)


@dataclass
class Trial:
    """One command that was killed several times and then ran to its end."""

    command: str
    trial: int
    kills: int = 0
    starts: int = 0
    started_over: int = 0  # starts from nothing, because a kill came before anything was saved
    resumed_at: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def _child(argv: list[str], log: str, record: str, point: str | None, at: int, small_shards: bool) -> None:
    """Start `deskside ARGV` in its own process group."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    import deskside
    from deskside.cli.main import main

    torch.set_num_threads(1)
    deskside.STARTED = time.perf_counter()
    points = KillPoints(Path(record), point, at)
    points.install()
    if small_shards:  # so that the small test data has several shards
        from deskside.data.corpus import analyze

        analyze.CorpusOptions = functools.partial(analyze.CorpusOptions, shard_bytes=30_000)  # type: ignore[assignment,misc]
    code = main(argv)
    points.finish()
    sys.exit(code)


class Runner:
    """Starts and kills commands in the folder `work`. writes: share of the kills that happen during a write."""

    def __init__(self, work: Path, seed: int, writes: float) -> None:
        self.work, self.rng, self.writes = work, random.Random(seed), writes
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["deskside.cli.train", "deskside.train.training_run", "deskside.report.write", "transformers"]
        )
        self.kills: list[Kill] = []
        self.trials: list[Trial] = []
        self.number = 0

    def begin(self, argv: list[str], point: str | None = None, at: int = 0) -> tuple[BaseProcess, Path, Path]:
        """Start a command, killed at number `at` of the kill point `point`. Return the process, its log and record."""
        self.number += 1
        log, record = (self.work / "logs" / f"{self.number:04d}.{end}" for end in ("log", "json"))
        log.parent.mkdir(exist_ok=True)
        arguments = (argv, str(log), str(record), point, at, argv[0] == "data")
        process: BaseProcess = self.context.Process(target=_child, args=arguments)  # type: ignore[attr-defined]
        process.start()
        return process, log, record

    def run(self, argv: list[str]) -> tuple[float, dict[str, int]]:
        """Run a command to its end. Return its seconds and the number of its kill points of each kind.

        Raises:
            RuntimeError: The command failed.
        """
        begin = time.monotonic()
        process, log, record = self.begin(argv)
        process.join(TIMEOUT_SECONDS)
        if process.exitcode != 0:
            end_group(process)
            raise RuntimeError(
                f"deskside {' '.join(argv)}: exit code {process.exitcode}\n{log.read_text()[-3000:]}"
            )
        return time.monotonic() - begin, json.loads(record.read_text())["counts"]

    def run_trial(
        self, command: Command, reference: Any, seconds: float, counts: dict[str, int], kills: int
    ) -> int:
        """Kill a command at most `kills` times, run it to its end, and compare. Return the number of kills.

        reference, seconds, counts: outcome, duration and kill points of the command without kills.
        """
        trial = Trial(command.name, len(self.trials))
        self.trials.append(trial)
        folder = self.work / f"{command.name}-{trial.trial}"
        begin = time.monotonic()
        try:
            self._run_to_end(command, folder, trial, seconds, counts, kills)
            if not trial.problems and (outcome := command.outcome(folder)) != reference:
                trial.problems.append(
                    f"differs from the run without kills: {first_difference(reference, outcome)}"
                )
        except (OSError, ValueError, KeyError) as error:
            trial.problems.append(f"{type(error).__name__}: {error}")
        trial.seconds = round(time.monotonic() - begin, 1)
        if not trial.problems:
            shutil.rmtree(folder)
        verdict = "; ".join(trial.problems) or "same"
        print(
            f"{command.name} {trial.trial}: {trial.kills} kills, {trial.starts} starts, {verdict}", flush=True
        )
        return trial.kills

    def _run_to_end(
        self, command: Command, folder: Path, trial: Trial, seconds: float, counts: dict[str, int], kills: int
    ) -> None:
        while trial.starts < MAX_STARTS:
            resumed = command.can_resume(folder)
            if not resumed and folder.exists():
                shutil.rmtree(folder)  # nothing had been saved
                trial.started_over += 1
            argv = command.resume(folder) if resumed else command.start(folder)
            newest = newest_checkpoint(folder) if command.checkpoints else None
            how: str | None = None
            delay, at = 0.0, 0
            if trial.kills < kills:
                how, delay, at = self._draw_kill(seconds, counts)
            trial.starts += 1
            begin, begin_time = time.monotonic(), time.time()
            process, log, record = self.begin(argv, how if how in POINTS else None, at)
            process.join(delay if how == "time" else TIMEOUT_SECONDS)
            ended = process.exitcode is not None
            end_group(process)
            text = log.read_text(errors="replace") if log.exists() else ""
            for step in map(int, re.findall(r"resumed at step (\d+)", text)):
                trial.resumed_at.append(step)
                if newest is not None and step < newest:
                    trial.problems.append(
                        f"resumed at step {step}, though checkpoint {newest} was complete ({log})"
                    )
            if not ended and how is None:
                trial.problems.append(f"did not end within {TIMEOUT_SECONDS:.0f} s ({log})")
                return
            if process.exitcode == 0:
                return
            if process.exitcode == 2 and "is finished" in text:
                return  # a kill after the last write: the run is compared like any other
            if process.exitcode != -signal.SIGKILL:
                if newest is None and resumed and command.checkpoints:
                    shutil.rmtree(folder)  # killed before anything was saved
                    trial.started_over += 1
                    continue
                trial.problems.append(f"exit code {process.exitcode}: {text[-500:]} ({log})")
                return
            assert how is not None
            trial.kills += 1
            at_point = json.loads(record.read_text()) if record.exists() else {}
            self.kills.append(
                Kill(
                    command.name,
                    trial.trial,
                    how,
                    round(time.monotonic() - begin, 3),
                    at_point.get("killed_at"),
                    at_point.get("background", False),
                    unfinished_files(folder, begin_time),
                    newest_checkpoint(folder) if command.checkpoints else None,
                )
            )
        trial.problems.append(f"has not ended after {MAX_STARTS} starts")

    def _draw_kill(self, seconds: float, counts: dict[str, int]) -> tuple[str, float, int]:
        """Draw a kill: "time" or a kind of kill point, the seconds before it, and the number of the kill point."""
        kinds = [point for point in POINTS if counts[point]]
        if self.rng.random() >= self.writes or not kinds:
            return "time", self.rng.uniform(0.05, 0.7) * seconds, 0
        how = self.rng.choice(kinds)
        return how, 0.0, self.rng.randint(1, counts[how])


def end_group(process: BaseProcess) -> None:
    """End a process and everything in its group."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        if process.is_alive():  # it does not have its own group yet
            process.kill()
    process.join(30)


def newest_checkpoint(run: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    names = [p.parent.name for p in run.glob("checkpoints/step-*/manifest.json")]
    return max((int(name.removeprefix("step-")) for name in names), default=None)


def unfinished_files(folder: Path, since: float) -> list[str]:
    """Return the files and folders with a temporary name written after the time `since`."""
    marks = (".tmp", "tmp-", "-tmp", ".partial", ".new")
    if not folder.exists():
        return []
    temporary = [p for p in folder.rglob("*") if any(mark in p.name for mark in marks)]
    return sorted(p.name for p in temporary if p.lstat().st_mtime >= since)[:5]


def first_difference(one: Any, other: Any, where: str = "") -> str:
    """Return the path of the first difference between two JSON values, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(
            (first_difference(one[k], other[k], f"{where}/{k}") for k in one if one[k] != other[k]), where
        )
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((first_difference(a, b, f"{where}/{i}") for i, (a, b) in pairs if a != b), where)
    return f"{where}: {str(one)[:150]} != {str(other)[:150]}"


def run_benchmark(
    work: Path,
    seed: int,
    kills: int,
    only: Sequence[str],
    save: Callable[[dict[str, Any]], object],
    writes: float = 0.5,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run every command without kills, then with kills, and return the result; `save` gets it after every trial."""
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    commands, runner = make_commands(work, device), Runner(work, seed, writes)
    chosen = [name for name in commands if name in only]
    total = sum(SHARES[name] for name in chosen)
    # Alignment starts from the model of an earlier command.
    needed = {"data", *chosen}
    if needed & {"dpo", "grpo"}:
        needed.add("sft")
    if "sft" in needed:
        needed.add("train")
    runner.run(commands["data"].start(work / "data"))
    references: dict[str, tuple[Any, float, dict[str, int]]] = {}
    for name in commands:
        if name in needed:
            if device == "cuda":
                # The first run compiles kernels, and would be much longer than those with kills.
                runner.run(commands[name].start(work / f"{name}-compiled"))
            folder = work / f"{name}-reference"
            seconds, counts = runner.run(commands[name].start(folder))
            references[name] = (commands[name].outcome(folder), seconds, counts)
            print(f"{name} without kills: {seconds:.1f} s, {counts}", flush=True)
    kills_left = {name: round(kills * SHARES[name] / total) for name in chosen}
    kills_left[chosen[0]] += kills - sum(kills_left.values())
    while any(kills_left.values()):  # in turn, so that an interrupted benchmark has killed every command
        for name in chosen:
            if kills_left[name] > 0:
                planned = min(kills_left[name], runner.rng.randint(2, 5))
                kills_left[name] -= runner.run_trial(commands[name], *references[name], planned)
                save(as_json(runner, seed, chosen, references))
    return as_json(runner, seed, chosen, references)


def as_json(
    runner: Runner, seed: int, chosen: Sequence[str], references: dict[str, tuple[Any, float, dict[str, int]]]
) -> dict[str, Any]:
    return {
        "seed": seed,
        "kills": len(runner.kills),
        "during_writes": sum(kill.during_write for kill in runner.kills),
        "in_background": sum(kill.background for kill in runner.kills),
        "lost_or_different": sum(bool(trial.problems) for trial in runner.trials),
        "by_command": {
            name: {
                "kills": sum(k.command == name for k in runner.kills),
                "during_writes": sum(k.command == name and k.during_write for k in runner.kills),
                "trials": sum(t.command == name for t in runner.trials),
                "seconds_without_kills": round(references[name][1], 2),
                "kill_points_without_kills": references[name][2],
            }
            for name in chosen
        },
        "each_kill": [asdict(kill) | {"during_write": kill.during_write} for kill in runner.kills],
        "each_trial": [asdict(trial) for trial in runner.trials],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--writes", type=float, default=0.5, help="share of the kills that happen during a write"
    )
    parser.add_argument("--out", type=Path, help="write every kill and every trial to this JSON file")
    parser.add_argument("--only", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", type=Path, help="folder for runs and logs; default: a temporary one")
    options = parser.parse_args(argv)
    work = options.work or Path(tempfile.mkdtemp(prefix="deskside-kills-"))
    work.mkdir(parents=True, exist_ok=True)

    def save(result: dict[str, Any]) -> None:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1).replace(str(work.resolve()), "WORK") + "\n")

    result = run_benchmark(
        work.resolve(), options.seed, options.kills, options.only, save, options.writes, options.device
    )
    shown = ("kills", "during_writes", "in_background", "lost_or_different", "by_command")
    summary = {key: result[key] for key in shown}
    print(json.dumps(summary, indent=1))
    if not result["lost_or_different"] and options.work is None:
        shutil.rmtree(work)
    return 1 if result["lost_or_different"] else 0


if __name__ == "__main__":
    sys.exit(main())
