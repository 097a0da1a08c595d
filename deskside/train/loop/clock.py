"""Ending on time: how many steps the run will have, decided at journalled moments.

The learning rate is a function of *progress*, the share of the run that is done, from 0 to 1. With a length in steps,
progress is step / steps. With a length in time, the number of steps is an estimate; when throughput turns out
different, the estimate is revised. A revision keeps the progress reached so far and spreads what is left of it over
the newly estimated steps:

    progress(step) = p0 + (1 - p0) * (step - s0) / remaining        from the latest revision (s0, p0, remaining)

So progress never jumps, the learning rate stays continuous, and the decay is complete at the last step, whatever the
throughput did. Revisions are written to plan.json before they take effect: a step that is repeated after a crash finds
the same revisions and so the same learning rate.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OVERRUN = 0.02  # share of the limit by which a run may end late so that its learning rate can decay
DECAYED = 0.98  # progress from which on the learning rate is as good as decayed
TOLERANCE = 0.02  # a plan that is off by more than this share of what is left is revised


@dataclass(frozen=True)
class Revision:
    """From `step` on (steps done), `remaining` more steps lead from `progress` to 1."""

    step: int
    progress: float
    remaining: int
    elapsed_seconds: float
    step_seconds: float | None
    reason: str


class StepPlan:
    """The journal of revisions, and progress as a function of the step."""

    def __init__(self, revisions: Sequence[Revision]):
        self.revisions = list(revisions)

    @classmethod
    def from_json(cls, rows: Sequence[dict[str, Any]]) -> "StepPlan":
        return cls([Revision(**row) for row in rows])

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(revision) for revision in self.revisions]

    def _valid_at(self, step: float) -> Revision:
        return next(r for r in reversed(self.revisions) if r.step <= step)

    def progress(self, step: float) -> float:
        """Share of the run done after `step` steps (a half step is its middle), in [0, 1]."""
        r = self._valid_at(step)
        if step - r.step >= r.remaining:
            return 1.0
        return r.progress + (1.0 - r.progress) * (step - r.step) / r.remaining

    def total_steps(self, step: int) -> int:
        """Planned steps of the whole run, as known at `step`."""
        r = self._valid_at(step)
        return r.step + r.remaining

    def done(self, step: int) -> bool:
        return step >= self.total_steps(step)

    @property
    def journalled_until(self) -> int:
        """Steps up to this one have their revisions already; a repeated step decides nothing anew."""
        return self.revisions[-1].step

    def revise(self, step: int, remaining: int, elapsed: float, step_seconds: float, reason: str) -> Revision:
        """Spread what is left over `remaining` steps from `step` on."""
        revision = Revision(step, self.progress(step), max(0, remaining), elapsed, step_seconds, reason)
        self.revisions.append(revision)
        return revision


def remaining_steps(
    seconds_left: float, progress: float, stage_ends: Sequence[float], stage_seconds: Sequence[float]
) -> int:
    """Steps that fit into `seconds_left`, when stage i takes `stage_seconds[i]` per step and ends at `stage_ends[i]`.

    Steps are spread evenly over progress, so a stage gets steps in proportion to its share of the progress left.
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
    """Whether a plan is off by more than one step and more than the tolerance.

    At most once in every two-hundredth of the run, so that a machine whose speed wavers does not fill the journal.
    """
    off = abs(planned_remaining - estimated_remaining)
    return off > max(1.0, TOLERANCE * planned_remaining) and seconds_since_last >= limit_seconds / 200


def decay_steps(step: int, progress: float) -> int:
    """The fewest steps that may be left after `step` steps for the learning rate to decay: 8, or a fiftieth of them.

    None where the run is as good as done. It matters only when time is lost all at once, as by a slow resume: the run
    then ends late by these steps rather than with a learning rate that never fell.
    """
    return 0 if progress >= DECAYED else min(step, max(8, math.ceil(step / 50)))


class Clock:
    """Seconds of the run, over all its processes one after another.

    kind "wall" counts everything since the first process started, but for the time from the checkpoint that a run was
    resumed from to its resume. `spent`: seconds that earlier processes are known to have taken.
    kind "training" counts only what lies between `start_step` and `end_step`: no compile, evaluation or checkpoint.
    """

    def __init__(self, kind: str, process_started: float, spent: float = 0.0):
        self.kind = kind
        self._started = process_started
        self._before = self._spent = spent  # seconds of earlier processes
        self._training = 0.0
        self._since: float | None = None

    def restore(self, seconds: float) -> None:
        """Begin from a checkpoint's clock."""
        if self.kind == "wall":
            self._before = max(seconds, self._spent)
        else:
            self._training = seconds

    def restore_running(self, seconds: float) -> None:
        """Go on from `seconds`, which this process has counted itself: time spent on lost steps is spent."""
        self._started, self._training = time.perf_counter(), seconds
        self._before = seconds

    def start(self) -> None:
        """Training steps begin (again)."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Training steps pause for something else."""
        if self._since is not None:
            self._training += time.perf_counter() - self._since
            self._since = None

    def seconds(self) -> float:
        if self.kind == "wall":
            return self._before + time.perf_counter() - self._started
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._training + running
