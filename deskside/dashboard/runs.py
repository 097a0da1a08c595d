"""RunProgress of live runs, and predictions of finished runs against their measurements."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deskside.run.record import MetricsLog, RunRecord, mapping, number, step_seconds
from deskside.study.results import Results

WINDOW = 20  # steps over which the current speed is taken
PLANNED = (
    ("tokens_per_second", "speed, tokens/s"),
    ("memory_gib", "peak memory, GiB"),
    ("bpb", "validation loss, bits per byte"),
    ("tokens", "tokens"),
)
UNPLANNED: list[float | None] = [None, None, None]
DRY_STEP = (("tokens", "tokens", "tokens"), ("memory_gib", "peak_memory_gib", "peak memory, GiB"))


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run; None is unknown.

    Attributes:
        seconds_left: Modelled: the remaining steps at the median pace of the last ones.
        silent_seconds: Time since the last write to metrics.jsonl.
        values: The newest value of each metric.
    """

    step: int | None
    total: int | None
    seconds_left: float | None
    silent_seconds: float | None
    values: dict[str, float]

    @property
    def share(self) -> float | None:
        """Fraction of the steps that are done, 0 to 1."""
        return None if self.step is None or not self.total else min(1.0, self.step / self.total)


def progress(record: RunRecord, log: MetricsLog, now: float | None = None) -> RunProgress:
    """Return the progress of a run from the newest rows of its metrics."""
    now = time.time() if now is None else now
    values: dict[str, float] = {}
    for place, row in enumerate(log.rows):
        # Validation metrics are logged rarely, so the newest ones may be older than the window.
        recent = place >= len(log.rows) - WINDOW
        values |= {
            key: value
            for key in row
            if (recent or key.startswith("val_")) and (value := number(row[key])) is not None
        }
    step = int(values["step"]) if "step" in values else None
    total, pace = record.total_steps, step_seconds(log.rows[-WINDOW - 1 :])
    left = None if step is None or total is None or pace is None else max(0, total - step) * pace
    return RunProgress(step, total, left, now - log.modified if log.modified else None, values)


@dataclass(frozen=True)
class Prediction:
    """One predicted quantity of one run or arm. `low` and `high` are None if the prediction has no range."""

    name: str
    quantity: str
    predicted: float
    low: float | None
    high: float | None
    measured: float
    source: str

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


def run_predictions(runs: Iterable[tuple[RunRecord, Mapping[str, Any]]]) -> list[Prediction]:
    """Return the predictions of `deskside go` and of the dry step for finished runs, given with their plan.json."""
    found: list[Prediction | None] = []
    for record, plan in runs:
        if not record.finished:
            continue
        predicted = mapping(record.summary.get("predicted"))
        for key, quantity in PLANNED:
            one = mapping(predicted.get(key))
            ends = one.get("plan")
            planned = [number(v) for v in ends] if isinstance(ends, list) and len(ends) == 3 else UNPLANNED
            found.append(_prediction(record.name, quantity, planned, one.get("measured"), "plan (modelled)"))
        initial = mapping(plan.get("initial"))
        for key, measured, quantity in DRY_STEP:
            planned = [None, number(initial.get(key)), None]
            actual = record.summary.get(measured)
            found.append(_prediction(record.name, quantity, planned, actual, "first step (measured)"))
    return [one for one in found if one is not None]


def trial_predictions(results: Results) -> list[Prediction]:
    """Return the predicted time of each arm's trials."""
    found = []
    for arm in results.arms:
        total = arm.estimates.get("total_seconds")
        planned = [None, arm.forecast_seconds, None]
        measured = None if total is None else total.mean
        found.append(_prediction(arm.label, "time of a trial, s", planned, measured, "plan (modelled)"))
    return [one for one in found if one is not None]


def _prediction(
    name: str, quantity: str, planned: list[float | None], measured: object, source: str
) -> Prediction | None:
    low, expected, high = planned
    actual = number(measured)
    if expected is None or expected <= 0 or actual is None or actual <= 0:
        return None
    return Prediction(name, quantity, expected, low, high, actual, source)
