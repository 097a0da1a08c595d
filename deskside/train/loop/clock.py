"""The run's clock, its plan of steps, and triggers at regular intervals.

The learning rate is a function of *progress*, the completed fraction of the run, from 0 to 1. If the length is given in
steps, progress is step / steps. If it is given in time, the number of steps is an estimate, which is revised when the
throughput changes. A revision keeps the progress reached so far and spreads the rest over the new estimate:

    progress(step) = p0 + (1 - p0) * (step - s0) / remaining        from the latest revision (s0, p0, remaining)

Progress and the learning rate are therefore continuous, and the decay is complete at the last step even if the
throughput changes. Example: after 400 of 1,000 planned steps (progress 0.4), the GPU throttles, and only 300 more steps
fit. Each of them then advances progress by 0.6 / 300 = 0.002 instead of 0.001.

A revision is written to plan.json before it takes effect. Steps that are repeated after a crash use the same revisions,
and thus the same learning rates.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deskside.config.duration import Duration

OVERRUN = 0.02  # fraction of the time limit by which a run may end late so that its learning rate can decay
DECAYED = 0.98  # progress beyond which the learning rate counts as decayed
TOLERANCE = 0.02  # a plan is revised if it is off by more than this fraction of the remaining steps


@dataclass(frozen=True)
class Revision:
    """After `step` steps the progress is `progress`; `remaining` more steps complete the run."""

    step: int
    progress: float
    remaining: int
    elapsed_seconds: float
    step_seconds: float | None
    reason: str


class StepPlan:
    """The revisions of a run, and progress as a function of the step."""

    def __init__(self, revisions: Sequence[Revision]):
        self.revisions = list(revisions)

    @classmethod
    def from_json(cls, rows: Sequence[dict[str, Any]]) -> "StepPlan":
        return cls([Revision(**row) for row in rows])

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(revision) for revision in self.revisions]

    def _revision_at(self, step: float) -> Revision:
        return next(r for r in reversed(self.revisions) if r.step <= step)

    def progress(self, step: float) -> float:
        """Return the completed fraction of the run after `step` steps, in [0, 1]. `step` may be fractional."""
        r = self._revision_at(step)
        if step - r.step >= r.remaining:
            return 1.0
        return r.progress + (1.0 - r.progress) * (step - r.step) / r.remaining

    def total_steps(self, step: int) -> int:
        """Return the number of steps of the whole run in the plan that is valid at `step`."""
        r = self._revision_at(step)
        return r.step + r.remaining

    def done(self, step: int) -> bool:
        return step >= self.total_steps(step)

    @property
    def last_revision_step(self) -> int:
        """Return the step of the latest revision. The plan up to it is final, even if its steps are repeated."""
        return self.revisions[-1].step

    def revise(self, step: int, remaining: int, elapsed: float, step_seconds: float, reason: str) -> Revision:
        """Spread the rest of the run over `remaining` steps from `step` on. elapsed: seconds of the run so far."""
        revision = Revision(step, self.progress(step), max(0, remaining), elapsed, step_seconds, reason)
        self.revisions.append(revision)
        return revision


def remaining_steps(
    seconds_left: float, progress: float, stage_ends: Sequence[float], stage_seconds: Sequence[float]
) -> int:
    """Return the number of steps that fit into `seconds_left`.

    Stage i takes `stage_seconds[i]` per step and ends at progress `stage_ends[i]`. Steps are spread evenly over
    progress, so each stage gets steps in proportion to its share of the remaining progress.
    """
    if progress >= 1.0 or seconds_left <= 0:
        return 0
    mean, start = 0.0, progress
    for end, seconds in zip(stage_ends, stage_seconds, strict=True):
        if end > start:
            mean += (end - start) / (1.0 - progress) * seconds
            start = end
    return int(seconds_left / mean)


def should_revise(
    planned_remaining: int, estimated_remaining: int, seconds_since_last: float, limit_seconds: float
) -> bool:
    """Return True if a plan is off by more than one step and more than the tolerance.

    1/200 of the run must have passed since the last revision, so that varying speed does not fill plan.json.
    """
    off = abs(planned_remaining - estimated_remaining)
    return off > max(1.0, TOLERANCE * planned_remaining) and seconds_since_last >= limit_seconds / 200


def decay_steps(step: int, progress: float) -> int:
    """Return the minimum number of further steps that the decay needs after `step` steps.

    It is 8 or 2 % of `step`, whichever is more, but at most `step`; 0 once the learning rate has decayed. The minimum
    matters only if a lot of time is lost at once, for example to a slow resume. The run then ends late by these steps,
    but with a decayed learning rate.
    """
    return 0 if progress >= DECAYED else min(step, max(8, math.ceil(step / 50)))


class Clock:
    """Elapsed seconds of a run, accumulated over all of its processes.

    kind "wall" counts everything since this process started, plus the time of earlier processes: `earlier_seconds`, or
    the clock of the restored checkpoint if that is more.
    kind "training" counts only the time between `start` and `stop`: no compilation, evaluation or checkpoints.
    """

    def __init__(self, kind: str, process_started: float, earlier_seconds: float = 0.0):
        self.kind = kind
        self._process_started = process_started
        self._known_earlier_seconds = earlier_seconds
        self._earlier_seconds = earlier_seconds
        self._training_seconds = 0.0
        self._training_since: float | None = None  # None while training is paused

    def restore(self, seconds: float) -> None:
        """Continue from the clock of a checkpoint."""
        if self.kind == "wall":
            self._earlier_seconds = max(seconds, self._known_earlier_seconds)
        else:
            self._training_seconds = seconds

    def set_after_rollback(self, seconds: float) -> None:
        """Set the clock to `seconds` after a rollback, which undoes steps but not the time that they took."""
        self._process_started = time.perf_counter()
        self._earlier_seconds = self._training_seconds = seconds

    def start(self) -> None:
        """Start or resume counting training time."""
        self._training_since = time.perf_counter()

    def stop(self) -> None:
        """Pause counting training time."""
        if self._training_since is not None:
            self._training_seconds += time.perf_counter() - self._training_since
            self._training_since = None

    def seconds(self) -> float:
        if self.kind == "wall":
            return self._earlier_seconds + time.perf_counter() - self._process_started
        running = time.perf_counter() - self._training_since if self._training_since is not None else 0.0
        return self._training_seconds + running


@dataclass(frozen=True)
class Position:
    """Position in a run, in the units of an interval."""

    steps: int
    tokens: int
    seconds: float


class Every:
    """Trigger that fires once per `every`, or never if it is None.

    An interval in steps or tokens fires when a multiple of it is reached, so a resumed run fires at the same positions.
    """

    def __init__(self, every: Duration | None, start: Position):
        self.every = every
        self._last = start

    def due(self, now: Position) -> bool:
        """Return True if the interval has passed since the last time this returned True."""
        if self.every is None:
            return False
        current, last = getattr(now, self.every.unit), getattr(self._last, self.every.unit)
        if self.every.unit == "seconds":
            reached = current - last >= self.every.value
        else:
            reached = current // self.every.value > last // self.every.value
        if reached:
            self._last = now
        return reached
