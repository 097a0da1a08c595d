"""What was predicted of runs and trials beside what came: rows for the Planner tab."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deskside.dashboard.reading import Brief
from deskside.run.record import mapping, number
from deskside.study.results import Results


@dataclass(frozen=True)
class Forecast:
    """One quantity of one run. low and high: of the prediction, None where it gave no range. by: who predicted."""

    what: str
    quantity: str
    predicted: float
    low: float | None
    high: float | None
    measured: float
    by: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


PLANNED = (
    ("tokens_per_second", "speed, tokens/s"),
    ("memory_gib", "peak memory, GiB"),
    ("bpb", "validation loss, bits per byte"),
    ("tokens", "tokens"),
)
DRY_STEP = (("tokens", "tokens", "tokens"), ("memory_gib", "peak_memory_gib", "peak memory, GiB"))


def of_runs(runs: Iterable[tuple[Brief, Mapping[str, Any]]]) -> list[Forecast]:
    """Of the runs that ended, each with its plan.json: what `deskside go` planned, and what its first step gave."""
    rows: list[Forecast] = []
    for brief, plan in runs:
        if not brief.finished:
            continue
        predicted = mapping(brief.summary.get("predicted"))
        for key, quantity in PLANNED:
            found = mapping(predicted.get(key))
            ends = found.get("plan")
            low, middle, high = (
                [number(v) for v in ends] if isinstance(ends, list) and len(ends) == 3 else [None] * 3
            )
            _add(rows, brief.name, quantity, middle, low, high, found.get("measured"), "plan (modelled)")
        initial = mapping(plan.get("initial"))
        for key, measured, quantity in DRY_STEP:
            expected, came = number(initial.get(key)), brief.summary.get(measured)
            _add(rows, brief.name, quantity, expected, None, None, came, "first step (measured)")
    return rows


def of_trials(results: Results) -> list[Forecast]:
    """Of a study: how long each arm's trials were expected to take."""
    rows: list[Forecast] = []
    for arm in results.arms:
        taken = arm.estimates.get("total_seconds")
        measured = None if taken is None else taken.mean
        _add(
            rows,
            arm.label,
            "time of a trial, s",
            arm.forecast_seconds,
            None,
            None,
            measured,
            "plan (modelled)",
        )
    return rows


def _add(
    rows: list[Forecast],
    what: str,
    quantity: str,
    expected: float | None,
    low: float | None,
    high: float | None,
    measured: object,
    by: str,
) -> None:
    came = number(measured)
    if expected is not None and expected > 0 and came is not None and came > 0:
        rows.append(Forecast(what, quantity, expected, low, high, came, by))
