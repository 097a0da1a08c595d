"""What is known of a study or a run, read from its directory whatever state that is in.

A study that cannot be read keeps its place in the list, with the reason. A run is read as deep as it is looked at: its
`Brief` (small files, a fraction of a millisecond) for lists and tables, its newest steps while it goes on, and
everything (`report.rundir`) for whole curves.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deskside.run.record import mapping, number, objects, read_run, text
from deskside.study import results as study_results
from deskside.study.results import INTERRUPTED, Arm, Estimate, Factor, Group, Results, Trial
from deskside.study.stats.metrics import BY_KEY
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import json_value

TAIL_BYTES = 2**16  # about 150 steps
RUNS = "runs"  # group of the runs that are no part of a study


@dataclass(frozen=True)
class Study:
    """A study's directory. Either `results` or `problem` is there."""

    path: Path
    results: Results | None
    problem: str


@dataclass(frozen=True)
class Brief:
    """A run in short.

    plan: empty for a finished run, whose summary says the same. metrics: keys of study/metrics.py, from its summary.
    total_steps: as planned last.
    """

    path: Path
    name: str
    created: str
    config: dict[str, Any]
    summary: dict[str, Any]
    plan: dict[str, Any]
    environment: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return text(self.summary.get("status")) == "finished"

    @property
    def metrics(self) -> dict[str, float]:
        """What its summary says, under the keys of study/metrics.py."""
        known = {key: number(self.summary.get(key)) for key in BY_KEY}
        return {key: value for key, value in known.items() if value is not None}

    @property
    def emulated(self) -> bool:
        said = self.summary.get("emulated")
        return said is True or mapping(self.plan.get("precision")).get("native") is False

    @property
    def precision(self) -> str:
        return (
            text(self.summary.get("precision"))
            or text(mapping(self.plan.get("precision")).get("chosen"))
            or text(mapping(self.config.get("precision")).get("name"))
        )

    @property
    def card(self) -> str:
        return card_words(self.environment)

    @property
    def total_steps(self) -> int | None:
        revisions = objects(self.plan.get("revisions"))
        if not revisions:
            return None
        step, remaining = number(revisions[-1].get("step")), number(revisions[-1].get("remaining"))
        return None if step is None or remaining is None else int(step + remaining)


@dataclass(frozen=True)
class Rows:
    """The newest steps of a run. written: when, seconds since 1970, 0 for not yet; problem: empty if there is none."""

    steps: list[dict[str, Any]]
    written: float
    problem: str


def read_study(path: Path) -> Study | None:
    """A study; None for a directory whose results.json is something else's."""
    try:
        return Study(path, study_results.read(path), "")
    except (RunError, UsageError) as error:
        if not (path / "study.json").exists() and not _claims_to_be_study(path / "results.json"):
            return None
        if not (path / "results.json").exists():
            return Study(path, None, "no trial has ended yet (there is no results.json)")
        return Study(path, None, str(error).removeprefix(f"{path / 'results.json'}: "))


def _claims_to_be_study(path: Path) -> bool:
    """By its first bytes, because a damaged file does not parse."""
    try:
        with path.open("rb") as file:
            return b'"schema_version"' in file.read(TAIL_BYTES)
    except OSError:
        return True


def read_brief(path: Path) -> Brief:
    """A run in short. What is missing or damaged is told in `problems`, and nothing is raised for it."""
    problems: list[str] = []
    run = _object(path / "run.json", problems, needed=True)
    summary = _object(path / "summary.json", problems)
    return Brief(
        path=path,
        name=text(run.get("name")) or path.name,
        created=text(run.get("created")),
        config=mapping(run.get("config")),
        summary=summary,
        plan={} if summary else _object(path / "plan.json", problems),
        environment=_object(path / "environment.json", problems),
        problems=problems,
    )


def read_plan(path: Path) -> dict[str, Any]:
    """A run's plan.json; empty where there is none that can be read."""
    return _object(path / "plan.json", [])


def _object(path: Path, problems: list[str], needed: bool = False) -> dict[str, Any]:
    try:
        value = json_value(path.read_bytes())
    except FileNotFoundError:
        if needed:
            problems.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is no JSON object")
        return {}
    return value


def read_rows(path: Path) -> Rows:
    """The newest steps of a run. A last line without its end is being written; others must parse."""
    metrics = path / "metrics.jsonl"
    try:
        with metrics.open("rb") as file:
            status = os.fstat(file.fileno())
            start = max(0, status.st_size - TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError as error:
        return Rows(
            [], 0.0, "" if isinstance(error, FileNotFoundError) else f"metrics.jsonl: {error.strerror}"
        )
    rows: list[dict[str, Any]] = []
    damaged = 0
    for line in lines[1 if start else 0 : -1]:
        try:
            row = json_value(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and number(row.get("step")) is not None:
            rows.append(row)
        elif line.strip():
            damaged += 1
    return Rows(
        rows, status.st_mtime, f"metrics.jsonl: {damaged} damaged lines were left out" if damaged else ""
    )


def read_curve(path: Path) -> tuple[list[dict[str, float | None]], list[str]]:
    """(a run's curve as `Trial.curve` has it, in full; what of it is missing, in sentences).

    Raises UsageError where there is no run.
    """
    keys = ("tokens", "seconds", "loss", "val_bpb")
    record = read_run(path)
    missing = [sentence for sentence in record.missing if "metrics.jsonl" in sentence]
    return [{key: number(row.get(key)) for key in keys} for row in record.metrics], missing


def as_results(briefs: Iterable[Brief], live: frozenset[Path], root: Path) -> Results:
    """Runs that are no part of a study, in the shape of one: each is an arm of one trial, compared with nothing."""
    arms: list[Arm] = []
    for brief in briefs:
        name = _relative(brief.path, root)
        metrics = brief.metrics
        status = "running" if brief.path in live else "finished" if brief.finished else INTERRUPTED
        reason = "" if brief.finished or status == "running" else "not finished"
        optimiser = text(mapping(brief.config.get("optim")).get("name"))
        levels = {"precision": brief.precision, "optimizer": optimiser, "card": brief.card}
        seed = number(brief.config.get("seed"))
        trial = Trial(
            seed=int(seed) if seed is not None else 0,
            status=status,
            reason="; ".join([*brief.problems, *([reason] if reason else [])]),
            run=str(brief.path),
            device=brief.card,
            attempts=1,
            started=brief.created,
            metrics=metrics,
        )
        arms.append(
            Arm(
                id=name,
                label=name.removeprefix("runs/"),
                group=RUNS,
                levels={key: value or "unknown" for key, value in levels.items()},
                baseline=name,
                emulated=brief.emulated,
                trials=[trial],
                estimates={key: Estimate(value, None, None, 1) for key, value in metrics.items()},
            )
        )
    labels = {"precision": "precision", "optimizer": "optimiser", "card": "card"}
    factors = [Factor(key, label, sorted({arm.levels[key] for arm in arms})) for key, label in labels.items()]
    return Results(
        name="runs outside of studies",
        question="Each run is shown as it is; runs that differ in more than one thing prove nothing of either.",
        created="",
        updated="",
        seeds=sorted({trial.seed for arm in arms for trial in arm.trials}),
        memory_fraction=0.0,
        machine={},
        groups=[Group(RUNS, "runs outside of studies", "", "", "", factors, [])],
        arms=arms,
    )


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else path.name


def card_words(machine: Mapping[str, Any]) -> str:
    """The card (or the CPU) of environment.json or of a study's machine; "unknown machine" where it is not said."""
    gpu = machine.get("gpu")
    name = text(gpu) or text(mapping(gpu).get("name"))
    if name:
        return name
    return text(machine.get("cpu")) or text(machine.get("device")) or "unknown machine"
