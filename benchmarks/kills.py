"""Kill training, alignment, studies, `go` and data preparation many times, and compare with uninterrupted runs.

    python -m benchmarks.kills --seed 1 --kills 200 --out docs/data/DATE-kills/kills.json [--only train sft]

The models have a few thousand parameters and run on one CPU thread. Half of the kills happen at a random time, the
others at a random point of writing a file (`kill_points`). After every kill the same command is resumed, and possibly
killed again. After two to five kills it runs to its end. Then

- the curve (step, tokens, learning rate, loss, gradient norm) and the final weights must be bit-identical to those of
  the run without kills; for a study, those of every trial; for prepared data, every byte;
- `go` uses the real clock, so its steps depend on the speed: every step must occur once, and the pipeline must finish;
- a resumed run must not start before the newest complete checkpoint that existed when it was killed.

The result is JSON with every kill and every trial. Exit code 1 if anything was lost or differs.
"""

import argparse
import functools
import hashlib
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

from benchmarks.kill_points import POINTS, KillPoints

# Share of each command in every 100 kills. The last two start child processes, which takes long.
SHARES = {"train": 26, "sft": 17, "dpo": 13, "grpo": 13, "data": 21, "study": 5, "go": 5}
PATIENCE = 600.0  # seconds until a command without kills must have ended
MAX_STARTS = 40  # per trial, so that a command without progress is reported

TOML = """
[model]
vocab_size = 300
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 64
max_position_embeddings = 128
[batch]
sequence_length = 64
tokens = 512
[compute]
device = "cpu"
attention = "reference"
[checkpoint]
every = "5 steps"
[evaluate]
every = "20 steps"
"""
STUDY = """
name = "kills"
question = "Does it go on?"
base = "tiny.toml"
seeds = 1
[budget]
steps_per_arm = 30
[[factor]]
name = "depth"
[[factor.level]]
name = "one"
set.model.num_hidden_layers = 1
[[factor.level]]
name = "two"
set.model.num_hidden_layers = 2
"""


@dataclass
class Kill:
    """One kill. `how` is "time" or a kill point; `file` what was being written there."""

    command: str
    trial: int
    how: str
    after_seconds: float
    file: str | None
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
    started_over: int = 0  # before anything was saved
    resumed_at: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Work:
    """A command under test.

    Args:
        start: Arguments of a new run in the folder `place`.
        resume: Arguments that resume it.
        outcome: Reads from `place` what must be the same as without kills.
        begun: Whether `place` contains something that `resume` can continue.
        at_root: Whether `place` contains the checkpoints of one run.
    """

    name: str
    start: Callable[[Path], list[str]]
    resume: Callable[[Path], list[str]]
    outcome: Callable[[Path], Any]
    begun: Callable[[Path], bool]
    checkpoints: bool = True


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
    if small_shards:  # several shards from little text
        from deskside.data.corpus import analyze

        analyze.CorpusOptions = functools.partial(analyze.CorpusOptions, shard_bytes=30_000)  # type: ignore[assignment,misc]
    code = main(argv)
    points.finish()
    sys.exit(code)


class Bench:
    """Runner that starts and kills commands in the folder `work`."""

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
        """Start a command. Return the process, its log, and the record of its kill points."""
        self.number += 1
        log, record = (self.work / "logs" / f"{self.number:04d}.{end}" for end in ("log", "json"))
        log.parent.mkdir(exist_ok=True)
        given = (argv, str(log), str(record), point, at, argv[0] == "data")
        process: BaseProcess = self.context.Process(target=_child, args=given)  # type: ignore[attr-defined]
        process.start()
        return process, log, record

    def run(self, argv: list[str]) -> tuple[float, dict[str, int]]:
        """Run a command to its end. Returns its seconds and how many kill points it passed.

        Raises:
            RuntimeError: it failed.
        """
        begin = time.monotonic()
        process, log, record = self.begin(argv)
        process.join(PATIENCE)
        if process.exitcode != 0:
            end_group(process)
            raise RuntimeError(
                f"deskside {' '.join(argv)}: exit code {process.exitcode}\n{log.read_text()[-3000:]}"
            )
        return time.monotonic() - begin, json.loads(record.read_text())["counts"]

    def trial(self, work: Work, reference: Any, seconds: float, counts: dict[str, int], kills: int) -> int:
        """Kill a command at most `kills` times, let it end, and compare. Return how often it was killed."""
        trial = Trial(work.name, len(self.trials))
        self.trials.append(trial)
        place = self.work / f"{work.name}-{trial.trial}"
        begin = time.monotonic()
        try:
            self._until_done(work, place, trial, seconds, counts, kills)
            if not trial.problems and (found := work.outcome(place)) != reference:
                trial.problems.append(
                    f"differs from the run without kills: {first_difference(reference, found)}"
                )
        except (OSError, ValueError, KeyError) as error:
            trial.problems.append(f"{type(error).__name__}: {error}")
        trial.seconds = round(time.monotonic() - begin, 1)
        if not trial.problems:
            shutil.rmtree(place)
        said = "; ".join(trial.problems) or "same"
        print(f"{work.name} {trial.trial}: {trial.kills} kills, {trial.starts} starts, {said}", flush=True)
        return trial.kills

    def _until_done(
        self, work: Work, place: Path, trial: Trial, seconds: float, counts: dict[str, int], kills: int
    ) -> None:
        while trial.starts < MAX_STARTS:
            resumed = work.begun(place)
            if not resumed and place.exists():
                shutil.rmtree(place)  # nothing had been saved
                trial.started_over += 1
            argv = work.resume(place) if resumed else work.start(place)
            newest = newest_checkpoint(place) if work.checkpoints else None
            how, delay, at = self._draw(seconds, counts) if trial.kills < kills else (None, 0.0, 0)
            trial.starts += 1
            begin, begun = time.monotonic(), time.time()
            process, log, record = self.begin(argv, how if how in POINTS else None, at)
            process.join(delay if how == "time" else PATIENCE)
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
                trial.problems.append(f"did not end within {PATIENCE:.0f} s ({log})")
                return
            if process.exitcode == 0:
                return
            if process.exitcode == 2 and "is finished" in text:
                return  # killed after the last write; it is compared like any other
            if process.exitcode != -signal.SIGKILL:
                if newest is None and resumed and work.checkpoints:
                    shutil.rmtree(place)  # killed before anything was saved
                    trial.started_over += 1
                    continue
                trial.problems.append(f"exit code {process.exitcode}: {text[-500:]} ({log})")
                return
            assert how is not None
            trial.kills += 1
            file = json.loads(record.read_text())["killed_at"] if record.exists() else None
            self.kills.append(
                Kill(
                    work.name,
                    trial.trial,
                    how,
                    round(time.monotonic() - begin, 3),
                    file,
                    unfinished(place, begun),
                    newest_checkpoint(place) if work.checkpoints else None,
                )
            )
        trial.problems.append(f"has not ended after {MAX_STARTS} starts")

    def _draw(self, seconds: float, counts: dict[str, int]) -> tuple[str, float, int]:
        """Draw a kill: how, after how many seconds, at which point."""
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
    found = [p.parent.name for p in run.glob("checkpoints/step-*/manifest.json")]
    return max((int(name.removeprefix("step-")) for name in found), default=None)


def unfinished(place: Path, since: float) -> list[str]:
    """Return the files and folders with a temporary name written after the time `since`."""
    marks = (".tmp", "tmp-", "-tmp", ".partial", ".new")
    named = [p for p in place.rglob("*") if any(mark in p.name for mark in marks)] if place.exists() else []
    return sorted(p.name for p in named if p.lstat().st_mtime >= since)[:5]


def first_difference(one: Any, other: Any, where: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(
            (first_difference(one[k], other[k], f"{where}/{k}") for k in one if one[k] != other[k]), where
        )
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((first_difference(a, b, f"{where}/{i}") for i, (a, b) in pairs if a != b), where)
    return f"{where}: {str(one)[:150]} != {str(other)[:150]}"


def curve(run: Path) -> list[list[Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[row.get(k) for k in ("step", "tokens", "lr", "loss", "grad_norm", "val_bpb")] for row in rows]


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def of_run(run: Path) -> dict[str, Any]:
    return {"curve": curve(run), "weights": weights(run)}


def of_study(study: Path) -> dict[str, Any]:
    results = json.loads((study / "results.json").read_text())
    trials = [
        (arm["id"], t["seed"], t["status"], t["metrics"].get("val_bpb"))
        for arm in results["arms"]
        for t in arm["trials"]
    ]
    curves = {p.parent.name: curve(p.parent) for p in sorted(study.glob("runs/*/metrics.jsonl"))}
    return {"trials": [list(t) for t in trials], "curves": curves}


def of_data(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.iterdir()
        if p.name != ".verified.json"
    }


def of_go(run: Path) -> dict[str, Any]:
    """Return the results of `go` that do not depend on the speed."""
    steps = [row[0] for row in curve(run)]
    state = json.loads((run / "go.json").read_text())
    return {
        "phase": state["phase"],
        "each_step_once": steps == list(range(1, len(steps) + 1)) and bool(steps),
        "model": (run / "model" / "model.safetensors").exists(),
        "report": (run / "report.html").exists(),
    }


def make_works(work: Path) -> dict[str, Work]:
    """Write the texts and settings and return the commands."""
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("riv", "sto", "shi", "lig") for b in ("er", "ne", "p", "ht")]
    records = [
        {"text": " ".join(rng.choices(words, k=60)) + ".\n", "lang": "en" if i % 2 else "xx"}
        for i in range(600)
    ]
    _jsonl(work / "text.jsonl", records)
    letters = ["".join(rng.choices("abcdef", k=3)) + f" {i % 10}" for i in range(240)]
    _jsonl(
        work / "chats.jsonl",
        [
            {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": q[-1]}]}
            for q in letters
        ],
    )
    _jsonl(
        work / "pairs.jsonl",
        [{"prompt": q, "chosen": f"yes {q[-1]}", "rejected": f"no {q[:2]}"} for q in letters],
    )
    _jsonl(work / "questions.jsonl", [{"prompt": q, "answer": q[-1]} for q in letters])
    (work / "tiny.toml").write_text(TOML)
    (work / "study.toml").write_text(STUDY)

    def run(name: str, head: list[str], more: list[str]) -> Work:
        def start(place: Path) -> list[str]:
            return [name, *head, "--runs", str(place.parent), "--name", place.name, *more]

        return Work(
            name,
            start,
            lambda place: [name, "--resume", str(place)],
            of_run,
            lambda p: (p / "run.json").exists(),
        )

    def aligned(name: str, base: str, data: str, *more: str) -> Work:
        head = [str(work / base), "--data", str(work / data)]
        common = [
            "--data.path",
            str(work / f"{name}-data"),
            "--batch.sequence_length",
            "64",
            "--compute.device",
            "cpu",
        ]
        return run(name, head, [*common, "--checkpoint.every", "4 steps", "--evaluate.every", "none", *more])

    def study(place: Path) -> list[str]:
        data = ["--data.path", str(work / "data")]
        return ["study", str(work / "study.toml"), "--out", str(place), *data]

    def go(place: Path) -> list[str]:
        where = [
            "--preset",
            str(work / "tiny.toml"),
            "--data",
            str(work / "data"),
            "--runs",
            str(place.parent),
        ]
        return ["go", "--hours", "0.006", "--name", place.name, "--yes", *where]

    def data(place: Path) -> list[str]:
        source = ["data", "prepare", str(work / "text.jsonl"), "--out", str(place)]
        return [*source, "--vocab-size", "300", "--workers", "1"]

    prepared = ["--data.path", str(work / "data")]
    return {
        "train": run("train", [str(work / "tiny.toml")], [*prepared, "--schedule.steps", "60"]),
        "sft": aligned("sft", "train-reference", "chats.jsonl", "--schedule.steps", "30", "--batch.tokens", "512"),
        "dpo": aligned("dpo", "sft-reference", "pairs.jsonl", "--schedule.steps", "20", "--batch.tokens", "1024"),
        "grpo": aligned(
            "grpo", "sft-reference", "questions.jsonl", "--schedule.steps", "10", "--questions", "4",
            "--align.group", "4", "--align.answer_tokens", "4", "--align.steps_per_rollout", "2",
        ),
        "data": Work("data", data, data, of_data, lambda p: True, checkpoints=False),
        "study": Work(
            "study", study, lambda p: ["study", str(p), "--resume"], of_study,
            lambda p: (p / "study.json").exists(), checkpoints=False,
        ),
        "go": Work(
            "go", go, lambda p: ["go", "--resume", str(p), "--yes"], of_go, lambda p: (p / "go.json").exists()
        ),
    }  # fmt: skip


def _jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def bench(
    work: Path,
    seed: int,
    kills: int,
    only: Sequence[str],
    save: Callable[[dict[str, Any]], object],
    writes: float = 0.5,
) -> dict[str, Any]:
    """Run the references and the kills, and return the result. `save` gets the partial result after every trial."""
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    works, found = make_works(work), Bench(work, seed, writes)
    chosen = [name for name in works if name in only]
    total = sum(SHARES[name] for name in chosen)
    needed = {"data"} | set(chosen) | ({"train"} if {"sft", "dpo", "grpo"} & set(chosen) else set())
    needed |= {"sft"} if {"dpo", "grpo"} & set(chosen) else set()
    found.run(works["data"].start(work / "data"))
    references: dict[str, tuple[Any, float, dict[str, int]]] = {}
    for name in works:
        if name in needed:
            place = work / f"{name}-reference"
            seconds, counts = found.run(works[name].start(place))
            references[name] = (works[name].outcome(place), seconds, counts)
            print(f"{name} without kills: {seconds:.1f} s, {counts}", flush=True)
    left = {name: round(kills * SHARES[name] / total) for name in chosen}
    left[chosen[0]] += kills - sum(left.values())
    while any(left.values()):  # round-robin, so that a benchmark that is cut short has killed all of them
        for name in chosen:
            if left[name] > 0:
                planned = min(left[name], found.rng.randint(2, 5))
                left[name] -= found.trial(works[name], *references[name], planned)
                save(as_json(found, seed, chosen, references))
    return as_json(found, seed, chosen, references)


def as_json(
    found: Bench, seed: int, chosen: Sequence[str], references: dict[str, tuple[Any, float, dict[str, int]]]
) -> dict[str, Any]:
    return {
        "seed": seed,
        "kills": len(found.kills),
        "during_writes": sum(kill.during_write for kill in found.kills),
        "lost_or_different": sum(bool(trial.problems) for trial in found.trials),
        "by_command": {
            name: {
                "kills": sum(k.command == name for k in found.kills),
                "during_writes": sum(k.command == name and k.during_write for k in found.kills),
                "trials": sum(t.command == name for t in found.trials),
                "seconds_without_kills": round(references[name][1], 2),
                "kill_points_without_kills": references[name][2],
            }
            for name in chosen
        },
        "each_kill": [asdict(kill) | {"during_write": kill.during_write} for kill in found.kills],
        "each_trial": [asdict(trial) for trial in found.trials],
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
    parser.add_argument("--work", type=Path, help="folder for runs and logs; default: a temporary one")
    options = parser.parse_args(argv)
    work = options.work or Path(tempfile.mkdtemp(prefix="deskside-kills-"))
    work.mkdir(parents=True, exist_ok=True)

    def save(result: dict[str, Any]) -> None:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1).replace(str(work.resolve()), "WORK") + "\n")

    result = bench(work.resolve(), options.seed, options.kills, options.only, save, options.writes)
    kept = {key: result[key] for key in ("kills", "during_writes", "lost_or_different", "by_command")}
    print(json.dumps(kept, indent=1))
    if not result["lost_or_different"] and options.work is None:
        shutil.rmtree(work)
    return 1 if result["lost_or_different"] else 0


if __name__ == "__main__":
    sys.exit(main())
