"""Reads a run directory for its report, whatever state it is in.

A run may be unfinished, killed while it wrote a line, or older than a file that we know. So nothing here raises for a
file that is missing or damaged: the reader gets what there is, and `missing` says in plain words what there is not.
Only a path that is no run directory at all is an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, json_value

LARGEST = 1e200


@dataclass(frozen=True)
class RunRecord:
    """What a run directory holds. Dicts are empty and lists are short where a file is missing."""

    path: Path
    run: dict[str, Any]  # run.json
    environment: dict[str, Any]  # environment.json
    plan: dict[str, Any]  # plan.json
    summary: dict[str, Any]  # summary.json
    metrics: list[dict[str, Any]]  # metrics.jsonl, one per step, in order of step
    events: list[str]  # events.log
    missing: list[str]  # sentences for the reader

    @property
    def name(self) -> str:
        """The run's own name; the directory's where run.json does not say."""
        return text(self.run.get("name")) or self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return mapping(self.run.get("config"))

    @property
    def finished(self) -> bool:
        """Whether the run says that it came to its end."""
        return text(self.summary.get("status")) in ("finished", "done", "complete", "completed")

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """(tokens, values) of every logged step that has a finite value of `key`."""
        points = [(number(line.get("tokens")), number(line.get(key))) for line in self.metrics]
        known = [(x, y) for x, y in points if x is not None and y is not None]
        return [x for x, _ in known], [y for _, y in known]

    def last(self, key: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.series(key)[1]
        return values[-1] if values else None


def read_run(path: Path) -> RunRecord:
    """Read a run directory. Raises UsageError when `path` is not one."""
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
    return RunRecord(
        path=path,
        run=_object(path / "run.json", "the configuration is unknown", missing),
        environment=_object(path / "environment.json", "the machine is unknown", missing),
        plan=_object(path / "plan.json", "nothing can be compared with the plan", missing),
        summary=_object(path / "summary.json", "the run has not come to its end", missing),
        metrics=_metrics(path / "metrics.jsonl", missing),
        events=_events(path / "events.log", missing),
        missing=missing,
    )


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Beyond what a float (and a plot's arithmetic) can hold there is only damage.
    return float(value) if abs(value) < LARGEST and math.isfinite(value) else None


def text(value: object) -> str:
    """A text, or the empty text for anything else."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """A JSON object as a dict, or the empty dict for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def objects(value: object) -> list[dict[str, Any]]:
    """The JSON objects of a list, or the empty list for anything else."""
    return [mapping(item) for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _read(path: Path, consequence: str, missing: list[str]) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        missing.append(f"{path.name} is missing: {consequence}.")
    except OSError as error:
        missing.append(f"{path.name} cannot be read ({error.strerror}): {consequence}.")
    return None


def _object(path: Path, consequence: str, missing: list[str]) -> dict[str, Any]:
    content = _read(path, consequence, missing)
    if content is None:
        return {}
    try:
        value = json_value(content)
    except Unreadable:
        missing.append(f"{path.name} is not valid JSON: {consequence}.")
        return {}
    if not isinstance(value, dict):
        missing.append(f"{path.name} is not a JSON object: {consequence}.")
        return {}
    return value


def _metrics(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    content = _read(path, "there is no curve to draw", missing)
    if content is None:
        return []
    by_step: dict[float, dict[str, Any]] = {}
    lines = [line for line in content.splitlines() if line.strip()]
    damaged = 0
    for index, line in enumerate(lines):
        try:
            value = json_value(line)
        except Unreadable:
            value = None
        step = number(value.get("step")) if isinstance(value, dict) else None
        if step is not None:
            by_step[step] = value  # a step that stands twice was done again after a resume
        elif index == len(lines) - 1 and not content.endswith("\n"):
            missing.append("The last line of metrics.jsonl is half written and was left out.")
        else:
            damaged += 1
    if damaged:
        missing.append(f"{damaged} damaged lines of metrics.jsonl were left out.")
    if not by_step:
        missing.append("metrics.jsonl has no logged step yet.")
    return [by_step[step] for step in sorted(by_step)]


def _events(path: Path, missing: list[str]) -> list[str]:
    content = _read(path, "skips, rollbacks and resumes are unknown", missing)
    return [] if content is None else [line for line in content.splitlines() if line.strip()]
