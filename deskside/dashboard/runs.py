"""Progress of live runs, and predictions for finished runs compared with their measurements."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Any

from deskside.run.record import MetricsLog, RunRecord, mapping, number, step_seconds
from deskside.study.results import Results
from deskside.utils.format import elapsed

SPEED_WINDOW = 20  # logged steps from which the current pace and values are taken
# (key of the prediction in summary.json, description)
PLANNED_QUANTITIES = (
    ("tokens_per_second", "speed, tokens/s"),
    ("memory_gib", "peak memory, GiB"),
    ("bpb", "validation loss, bits per byte"),
    ("tokens", "tokens"),
)
NO_PREDICTION: list[float | None] = [None, None, None]
# (key in the initial estimate of plan.json, key in summary.json, description)
DRY_STEP_QUANTITIES = (("tokens", "tokens", "tokens"), ("memory_gib", "peak_memory_gib", "peak memory, GiB"))


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run. Unknown values are None.

    Attributes:
        step, total: Steps taken, and steps planned.
        seconds_left: Modelled from the remaining steps and the median time per step of the last ones.
        silent_seconds: Time since the last write to metrics.jsonl.
        values: The newest value of each metric in the last `SPEED_WINDOW` rows; of validation metrics, in all rows.
    """

    step: int | None
    total: int | None
    seconds_left: float | None
    silent_seconds: float | None
    values: dict[str, float]

    @property
    def share(self) -> float | None:
        """Fraction of the planned steps that were taken, 0 to 1."""
        return None if self.step is None or not self.total else min(1.0, self.step / self.total)

    @property
    def text(self) -> str:
        """The step and the time left, such as "step 40 of 200; about 2 min left"."""
        total = f" of {self.total:,}" if self.total else ""
        left = "time left unknown" if self.seconds_left is None else f"about {_whole(self.seconds_left)} left"
        return f"step {self.step or 0:,}{total}; {left}"


def _whole(seconds: float) -> str:
    """Return a time without parts of a second, which no forecast knows."""
    return f"{round(seconds)} s" if seconds < 99.5 else elapsed(seconds)


def progress(record: RunRecord, log: MetricsLog, now: float | None = None) -> RunProgress:
    """Return the progress of a run from the newest rows of its metrics."""
    now = time.time() if now is None else now
    values: dict[str, float] = {}
    for index, row in enumerate(log.rows):
        # Validation metrics are logged rarely, so the newest ones may be older than the window.
        recent = index >= len(log.rows) - SPEED_WINDOW
        values |= {
            key: value
            for key in row
            if (recent or key.startswith("val_")) and (value := number(row[key])) is not None
        }
    step = int(values["step"]) if "step" in values else None
    total, seconds_per_step = record.total_steps, step_seconds(log.rows[-SPEED_WINDOW - 1 :])
    seconds_left = None
    if step is not None and total is not None and seconds_per_step is not None:
        seconds_left = max(0, total - step) * seconds_per_step
    silent_seconds = now - log.modified if log.modified else None
    return RunProgress(step, total, seconds_left, silent_seconds, values)


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
        """The measured value divided by the predicted one."""
        return self.measured / self.predicted


def run_predictions(runs: Iterable[tuple[RunRecord, Mapping[str, Any]]]) -> list[Prediction]:
    """Return the predictions by `deskside go` and by the dry step for finished runs, given as (record, plan.json)."""
    predictions: list[Prediction | None] = []
    for record, plan in runs:
        if not record.finished:
            continue
        recorded = mapping(record.summary.get("predicted"))
        for key, quantity in PLANNED_QUANTITIES:
            values = mapping(recorded.get(key))
            planned, measured = values.get("plan"), values.get("measured")
            plan_range = NO_PREDICTION
            if isinstance(planned, list) and len(planned) == 3:
                plan_range = [number(value) for value in planned]
            predictions.append(_prediction(record.name, quantity, plan_range, measured, "plan (modelled)"))
        initial = mapping(plan.get("initial"))
        for key, summary_key, quantity in DRY_STEP_QUANTITIES:
            plan_range = [None, number(initial.get(key)), None]
            measured = record.summary.get(summary_key)
            predictions.append(
                _prediction(record.name, quantity, plan_range, measured, "first step (measured)")
            )
    return [prediction for prediction in predictions if prediction is not None]


def trial_predictions(study: str, results: Results) -> list[Prediction]:
    """Return the prediction of a trial's duration for each arm that has one and was measured. study: its name."""
    headings = {group.name: group.heading for group in results.groups}
    several = len(headings) > 1
    predictions = []
    for arm in results.arms:
        total_seconds = arm.estimates.get("total_seconds")
        plan_range = [None, arm.forecast_seconds, None]
        measured = None if total_seconds is None else total_seconds.mean
        name = f"{arm.label} ({headings.get(arm.group, arm.group)})" if several else arm.label
        quantity = f"time of a trial of {study}, s"
        predictions.append(_prediction(name, quantity, plan_range, measured, "plan (modelled)"))
    return [prediction for prediction in predictions if prediction is not None]


def _prediction(
    name: str, quantity: str, plan_range: list[float | None], measured: object, source: str
) -> Prediction | None:
    low, expected, high = plan_range
    measured_number = number(measured)
    if expected is None or expected <= 0 or measured_number is None or measured_number <= 0:
        return None
    return Prediction(name, quantity, expected, low, high, measured_number, source)


@dataclass(frozen=True)
class Accuracy:
    """Errors of the predictions of one quantity.

    Attributes:
        predicted, measured: Medians.
        error: Median of measured / predicted - 1.
        worst: The prediction that is furthest off, as a factor.
        within_range: How many measured values lie within the range of their prediction; None if none has a range.
    """

    quantity: str
    source: str
    predictions: tuple[Prediction, ...]
    predicted: float
    measured: float
    error: float
    worst: Prediction
    within_range: int | None


def accuracies(predictions: Iterable[Prediction]) -> list[Accuracy]:
    """Return the accuracy of each quantity and source, those with the most predictions first."""
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault((prediction.quantity, prediction.source), []).append(prediction)
    found = []
    for (quantity, source), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        ranged = [p for p in members if p.low is not None and p.high is not None]
        within = sum(
            p.low <= p.measured <= p.high for p in ranged if p.low is not None and p.high is not None
        )
        found.append(
            Accuracy(
                quantity,
                source,
                tuple(members),
                median(p.predicted for p in members),
                median(p.measured for p in members),
                median(p.ratio - 1 for p in members),
                max(members, key=lambda p: abs(log(p.ratio))),
                within if ranged else None,
            )
        )
    return found
