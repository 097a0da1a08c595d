"""Tolerant reader of run directories, for everything that shows, compares or measures runs.

A run may be unfinished, killed while it wrote a line, or written by an older version. Nothing here raises for a file
that is missing or damaged: readers get what could be read, and a list of problems. Only a path that is not a run
directory at all is an error. Code that continues a run uses `RunDirectory`, which is strict.
"""

import itertools
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, json_value

LARGEST = 1e200  # larger values are damage, and the arithmetic of a plot would overflow
TAIL_BYTES = 2**16  # about 150 rows of metrics.jsonl
MISSING = "is missing"
FILES = {
    "run.json": "the configuration is unknown",
    "environment.json": "the machine is unknown",
    "summary.json": "the run has not finished",
    "plan.json": "nothing can be compared with the plan",
}


@dataclass(frozen=True)
class MetricsLog:
    """The rows of metrics.jsonl in order of their step; of a repeated step, the last.

    Attributes:
        damaged: Number of lines that were left out.
        partial: Whether a kill or a running writer left the last line incomplete.
        modified: Time of the last write in seconds since 1970, 0 if there is no file.
        error: Why the file could not be read, or the empty string.
    """

    rows: list[dict[str, Any]]
    damaged: int = 0
    partial: bool = False
    modified: float = 0.0
    error: str = ""

    @property
    def problem(self) -> str:
        """One phrase for lists of runs, or the empty string."""
        if self.error and self.error != MISSING:
            return f"metrics.jsonl {self.error}"
        return f"metrics.jsonl: {self.damaged} damaged lines were left out" if self.damaged else ""


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run directory. Dicts and lists are empty where a file is missing or was not read."""

    path: Path
    run: dict[str, Any]  # run.json
    environment: dict[str, Any]  # environment.json
    plan: dict[str, Any]  # plan.json
    summary: dict[str, Any]  # summary.json
    metrics: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl, in order of step
    events: list[str] = field(default_factory=list)  # events.log
    missing: list[str] = field(default_factory=list)  # sentences about missing and damaged files

    @property
    def name(self) -> str:
        """The name in run.json, or the directory's."""
        return text(self.run.get("name")) or self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return mapping(self.run.get("config"))

    @property
    def finished(self) -> bool:
        """True if the summary says that the run finished."""
        return text(self.summary.get("status")) in ("finished", "done", "complete", "completed")

    @property
    def precision(self) -> str:
        """Name of the precision recipe: the one that was used, else the one that was asked for."""
        return (
            text(self.summary.get("precision"))
            or text(mapping(self.plan.get("precision")).get("chosen"))
            or text(mapping(self.config.get("precision")).get("name"))
        )

    @property
    def emulated(self) -> bool:
        """True if the number format was emulated."""
        return (
            self.summary.get("emulated") is True or mapping(self.plan.get("precision")).get("native") is False
        )

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run by the last revision of its plan."""
        revisions = objects(self.plan.get("revisions"))
        total = planned_steps(revisions[-1]) if revisions else None
        return None if total is None else int(total)

    def series(self, key: str, across: str = "tokens") -> tuple[list[float], list[float]]:
        """Return (`across`, `key`) of every logged step that has a finite value of both."""
        return series(self.metrics, key, across)

    def last(self, key: str) -> float | None:
        """Return the newest finite value of a metric."""
        values = self.series(key)[1]
        return values[-1] if values else None

    def newest(self, in_summary: str, in_metrics: str) -> float | None:
        """Return a number of the summary, or the newest one of a metric."""
        value = number(self.summary.get(in_summary))
        return value if value is not None else self.last(in_metrics)


def read_run(path: Path) -> RunRecord:
    """Read a whole run directory. Raises UsageError if `path` is not one."""
    if not path.exists():
        near = Path("runs") / path
        hint = f"did you mean {near}?" if near.is_dir() else "give the directory of a run, such as runs/demo"
        raise UsageError(f"{path}: no such run; {hint}")
    if not path.is_dir():
        raise UsageError(f"{path}: is a file; give the directory of a run, such as runs/demo")
    if not any((path / name).is_file() for name in ("run.json", "metrics.jsonl", "summary.json")):
        raise UsageError(
            f"{path}: not a run directory (it has no run.json, metrics.jsonl or summary.json); "
            "give one that `deskside train` made"
        )
    missing: list[str] = []
    contents = {}
    for name, consequence in FILES.items():
        contents[name], problem = read_object(path / name)
        if problem:
            missing.append(f"{name} {problem}: {consequence}.")
    log = read_metrics(path)
    if log.error:
        missing.append(f"metrics.jsonl {log.error}: there is no curve to draw.")
    if log.partial:
        missing.append("The last line of metrics.jsonl is incomplete and was left out.")
    if log.damaged:
        missing.append(f"{log.damaged} damaged lines of metrics.jsonl were left out.")
    if not log.rows and not log.error:
        missing.append("metrics.jsonl has no logged step yet.")
    try:
        events = (path / "events.log").read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        events = []
        problem = MISSING if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        missing.append(f"events.log {problem}: skips, rollbacks and resumes are unknown.")
    return _record(path, contents, log.rows, [line for line in events if line.strip()], missing)


def read_brief(path: Path) -> RunRecord:
    """Read the small files of a run, for lists of many runs.

    The plan of a finished run is not read, because its summary says the same. A missing file is a problem only if it
    is run.json; the others are written later.
    """
    contents, problems = dict[str, dict[str, Any]](), []
    for name in FILES:
        skipped = name == "plan.json" and bool(contents["summary.json"])
        contents[name], problem = ({}, "") if skipped else read_object(path / name)
        if problem and (problem != MISSING or name == "run.json"):
            problems.append(f"{name} {problem}")
    return _record(path, contents, [], [], problems)


def _record(
    path: Path,
    contents: Mapping[str, dict[str, Any]],
    metrics: list[dict[str, Any]],
    events: list[str],
    missing: list[str],
) -> RunRecord:
    run, environment, summary, plan = (contents[name] for name in FILES)
    return RunRecord(path, run, environment, plan, summary, metrics, events, missing)


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file and the empty string, or {} and the reason, such as `MISSING`."""
    try:
        value = json_value(path.read_bytes())
    except FileNotFoundError:
        return {}, MISSING
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    except Unreadable as error:
        return {}, f"is not valid JSON ({error})"
    return (value, "") if isinstance(value, dict) else ({}, "is not a JSON object")


def read_metrics(path: Path, tail: int | None = None) -> MetricsLog:
    """Read metrics.jsonl of a run, or only the rows in its last `tail` bytes. Never raises."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            status = os.fstat(file.fileno())
            start = 0 if tail is None else max(0, status.st_size - tail)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return MetricsLog([], error=MISSING if missing else f"cannot be read ({error.strerror})")
    by_step: dict[float, dict[str, Any]] = {}
    damaged, partial = 0, False
    for index, line in enumerate(lines):
        if not line.strip() or (index == 0 and start > 0):
            continue
        try:
            row = json_value(line)
        except Unreadable:
            row = None
        step = number(row.get("step")) if isinstance(row, dict) else None
        if step is not None:
            by_step[step] = row  # a step that was repeated after a resume replaces the earlier one
        elif index == len(lines) - 1:
            partial = True
        else:
            damaged += 1
    rows = [by_step[step] for step in sorted(by_step)]
    return MetricsLog(rows, damaged, partial, status.st_mtime)


def series(rows: list[dict[str, Any]], key: str, across: str) -> tuple[list[float], list[float]]:
    """Return (`across`, `key`) of every row that has a finite value of both."""
    points = [(number(row.get(across)), number(row.get(key))) for row in rows]
    known = [(x, y) for x, y in points if x is not None and y is not None]
    return [x for x, _ in known], [y for _, y in known]


def step_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Return the median seconds per step, which ignores a resume or an evaluation between two rows."""
    points = zip(*series(rows, "seconds", "step"), strict=True)
    pairs = itertools.pairwise(points)
    times = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairs if s1 > s0 and t1 > t0]
    return statistics.median(times) if times else None


def planned_steps(revision: Mapping[str, Any]) -> float | None:
    """Return the total steps that a revision of the plan expects."""
    step, remaining = number(revision.get("step")), first_number(revision, "remaining", "remaining_steps")
    return None if step is None or remaining is None else step + remaining


def first_number(values: Mapping[str, Any], *keys: str) -> float | None:
    """Return the first of these values that is a finite number."""
    return next((value for key in keys if (value := number(values.get(key))) is not None), None)


def number(value: object) -> float | None:
    """Return a finite number as a float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < LARGEST and math.isfinite(value) else None


def text(value: object) -> str:
    """Return a string, or the empty string for anything else."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """Return a JSON object as a dict, or an empty dict for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def objects(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects in a list, or an empty list for anything else."""
    return [mapping(item) for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested JSON objects by their dotted keys. An empty object is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def machine_name(machine: Mapping[str, Any], otherwise: str = "unknown machine") -> str:
    """Return the GPU, or else the CPU, that environment.json or a study's machine names."""
    gpu = machine.get("gpu")
    name = text(gpu) or text(mapping(gpu).get("name"))
    return name or text(machine.get("cpu")) or text(machine.get("device")) or otherwise
