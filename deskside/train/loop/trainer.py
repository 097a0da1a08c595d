"""The training loop, short enough to read at one sight, and what surrounds a step.

The host runs one step ahead: it launches step k + 1 and only then reads the metrics of step k, so the GPU never waits
for the host. Evaluation, checkpoints and the end of the run first wait for the pending step. Step times are measured
between `DeviceEvent`s, because the moment at which the host reads the metrics says nothing about when they were ready.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deskside.config.run import RunConfig
from deskside.data.reading.loader import Batch
from deskside.optim.schedule import lr_factor
from deskside.train.loop.clock import OVERRUN, Clock, StepPlan, decay_steps, remaining_steps, should_revise
from deskside.train.loop.device_timer import DeviceEvent
from deskside.train.loop.guard import Diverged
from deskside.train.loop.step import StepMetrics, Stepper
from deskside.train.loop.stop import StopSignal
from deskside.train.loop.trigger import Every, Position
from deskside.train.objective import Batches, Feed, RowDataset

RECENT_STEPS = 20  # step times that the throughput is taken from
MEASURED_STEPS = 5  # steps before what was measured replaces the estimate of the dry step


@dataclass
class StageWork:
    """One stage of the run: its rows, its batch, and what a step of it takes by the dry step (seconds)."""

    until: float
    sequence_length: int
    tokens_per_step: int
    micro_rows: int
    window: int | None
    dataset: RowDataset
    dry_seconds: float
    flops_per_token: float


@dataclass
class TrainProgress:
    """Where the run is. `rows` counts the rows used at each sequence length: the position in the data."""

    step: int = 0
    tokens: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    rollbacks: int = 0


class Keeper(Protocol):
    """Saves and restores; see `keeper.py`."""

    def save(self, progress: TrainProgress, seconds: float) -> None: ...
    def roll_back(self) -> TrainProgress: ...


class StepLogger(Protocol):
    """Something that wants each step's row, such as the terminal or a tracker."""

    def on_step(self, row: dict[str, Any], total_steps: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class PendingStep:
    """A step that was launched and whose numbers the host has not read."""

    stage: int
    row: dict[str, Any]
    numbers: StepMetrics


class TooManySkips(Exception):
    """Guarded steps in a row reached the limit."""


class Trainer:
    """Runs steps until the plan is done or a signal comes.

    `limit_seconds` is the length in time (None: counted in steps) and `reserve` says how much of it must be left for
    what follows the last step. Up to step `decided_until` the run was here before and revises nothing. `measure`
    adds what only the process knows to a row (mfu, memory, watts).
    """

    def __init__(
        self,
        config: RunConfig,
        stepper: Stepper,
        plan: StepPlan,
        clock: Clock,
        progress: TrainProgress,
        stages: Sequence[StageWork],
        keeper: Keeper,
        hooks: Sequence[StepLogger],
        *,
        evaluate: Callable[[], dict[str, float]],
        measure: Callable[[dict[str, Any], float | None], dict[str, Any]],
        event: Callable[[str], None],
        journal: Callable[[StepPlan], None],
        limit_seconds: float | None,
        reserve: Callable[[], float],
        decided_until: int = 0,
    ):
        self.config, self.stepper, self.plan, self.clock = config, stepper, plan, clock
        self.progress, self.stages, self.keeper, self.hooks = progress, stages, keeper, hooks
        self.evaluate, self.measure, self.event, self.journal = evaluate, measure, event, journal
        self.limit_seconds, self.reserve = limit_seconds, reserve
        self.decided_until = decided_until
        self._start_intervals()
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.timed_seconds, self.timed_tokens, self.timed_flops, self.paused_seconds = 0.0, 0, 0.0, 0.0
        # A warm-up in steps is a share of the run as it was first planned, or a revision would move its end.
        self.first_steps = max(1, plan.total_steps(0))
        self._in_flight: PendingStep | None = None
        self._lap: DeviceEvent | None = None  # the end of the last step that was read, or of a pause
        self._stage = -1
        self._loader: Batches | None = None

    def run(self, stop: StopSignal) -> str:
        """Returns "finished", or the name of the signal that stopped the run (with everything saved)."""
        try:
            self._resume()
            while not self.plan.done(self.progress.step):
                try:
                    self.one_step()
                    if self.after_step(stop):
                        return str(stop.requested)
                except TooManySkips as trouble:
                    self.go_back(str(trouble))
            return "finished"
        finally:
            self.clock.stop()
            self._close_loader()

    def one_step(self) -> None:
        """Launch the next step, then read the numbers of the one before it."""
        progress, number = self.progress, self.progress.step + 1
        stage, batches = self._enter_stage()
        share = self.plan.progress(progress.step)
        factor = lr_factor(self.config.schedule, share, self.first_steps)
        self.stepper.set_progress(factor, share, progress.step)
        numbers = self.stepper.run(next(batches), number)

        progress.step = number
        progress.tokens += stage.tokens_per_step
        rows = stage.tokens_per_step // stage.sequence_length
        progress.rows[stage.sequence_length] = progress.rows.get(stage.sequence_length, 0) + rows
        before = self._in_flight
        lr = next(iter(self.stepper.optimizer.lr_groups().values()))
        row = {"step": number, "tokens": progress.tokens, "lr": lr}
        self._in_flight = PendingStep(self._stage, row, numbers)
        if before is not None:
            self._log(self._read(before))

    def after_step(self, stop: StopSignal) -> bool:
        """Rank 0 decides what is due, all do it. Returns whether the run must stop here."""
        must_stop, evaluate, save, remaining = self._decide(stop)
        step = self.progress.step
        if remaining >= 0:
            self.plan.revise(
                step, remaining, self.clock.seconds(), self._step_seconds(), "throughput changed"
            )
            self.journal(self.plan)
        done = self.plan.done(step)
        if not (must_stop or evaluate or save or done):
            return False
        row = self._settle()
        paused = time.perf_counter()
        self.clock.stop()
        if evaluate and not done:
            row |= self.evaluate()
        self._log(row)
        if (save or must_stop) and not done:
            self.keeper.save(self.progress, self.clock.seconds())
        self.paused_seconds += time.perf_counter() - paused
        self._resume()
        return must_stop and not done

    def go_back(self, why: str) -> None:
        """Return to the last checkpoint, but go on in the data, so that the same rows do not fail again."""
        self.clock.stop()
        self._in_flight = None
        count, rows = self.progress.rollbacks + 1, self.progress.rows
        if count > self.config.guard.max_rollbacks:
            raise Diverged(
                f"{why}, and the run went back {self.config.guard.max_rollbacks} times already; "
                f"lower the learning rate (--optim.lr) or look at the data near step {self.progress.step}"
            )
        self.progress = self.keeper.roll_back()
        self.progress.rollbacks, self.progress.rows = count, rows
        self.event(f"{why}: went back to step {self.progress.step} and skipped the data in between")
        self._close_loader()
        self._start_intervals()  # what was due in the steps that are repeated is due again
        self._resume()

    def position(self) -> Position:
        return Position(self.progress.step, self.progress.tokens, self.clock.seconds())

    def flops_per_second(self) -> float | None:
        """The model's FLOPs over the same steps."""
        return self.timed_flops / self.timed_seconds if self.timed_seconds else None

    def tokens_per_second(self) -> float | None:
        """Mean over the steps of this process, pauses for evaluation and checkpoints left out."""
        return self.timed_tokens / self.timed_seconds if self.timed_seconds else None

    def _enter_stage(self) -> tuple[StageWork, Iterator[list[Batch]]]:
        share = self.plan.progress(self.progress.step)
        index = next((i for i, s in enumerate(self.stages) if share < s.until), len(self.stages) - 1)
        stage = self.stages[index]
        if index != self._stage or self._loader is None:
            self._close_loader()
            self._stage = index
            self.recent.clear()
            world = self.stepper.world
            self.stepper.set_window(stage.window)
            feed = Feed(
                seed=self.config.seed,
                start_row=self.progress.rows.get(stage.sequence_length, 0),
                rows_per_step=stage.tokens_per_step // stage.sequence_length,
                micro_batch_rows=stage.micro_rows,
                rank=world.rank,
                world_size=world.size,
                device=world.device,
                document_mask=self.config.data.document_mask,
                prefetch=self.config.data.prefetch,
            )
            self._loader = self.stepper.objective.loader(stage.dataset, feed)
            self._batches = iter(self._loader)
            if len(self.stages) > 1:
                self.event(
                    f"stage {index + 1} of {len(self.stages)}: sequences of {stage.sequence_length} tokens"
                )
        return stage, self._batches

    def _read(self, step: PendingStep) -> dict[str, Any]:
        """Wait for a step's numbers and complete its row. Raises TooManySkips."""
        row = step.row
        loss, norm, skipped = step.numbers.read()
        check = self.stepper.guard.record(row["step"], loss, norm, skipped)
        tokens_per_second = flops_per_second = None
        if self._lap is not None:
            seconds = step.numbers.end.seconds_since(self._lap)
            stage = self.stages[step.stage]
            if step.stage == self._stage:  # a new stage's first step may be in flight already
                self.recent.append(seconds)
            tokens_per_second = stage.tokens_per_step / seconds
            flops_per_second = tokens_per_second * stage.flops_per_token
            self.timed_seconds += seconds
            self.timed_tokens += stage.tokens_per_step
            self.timed_flops += stage.tokens_per_step * stage.flops_per_token
        self._lap = step.numbers.end
        if check.skipped:
            self.event(f"step {row['step']} skipped: {check.reason}")
        if check.too_many:
            raise TooManySkips(f"{self.config.guard.max_skips} steps in a row had to be skipped")
        row |= {"seconds": self.clock.seconds(), "loss": loss, "grad_norm": norm}
        row |= {"skipped": check.skipped, "tokens_per_second": tokens_per_second}
        row |= self.stepper.objective.row(step.numbers.extra(), step.numbers.count)
        return self.measure(row, flops_per_second)

    def _settle(self) -> dict[str, Any]:
        """Wait for the step in flight and return its row, not logged yet."""
        assert self._in_flight is not None
        in_flight, self._in_flight = self._in_flight, None
        return self._read(in_flight)

    def _log(self, row: dict[str, Any]) -> None:
        for hook in self.hooks:
            hook.on_step(row, self.plan.total_steps(row["step"]))

    def _decide(self, stop: StopSignal) -> tuple[bool, bool, bool, int]:
        """(stop, evaluate, save, newly planned remaining steps or -1), the same on every rank."""
        now = self.position()
        decision = [
            float(stop.number),
            float(self.evaluate_every.due(now)),
            float(self.save_every.due(now)),
            float(self._replan()),
        ]
        if self.stepper.world.size > 1:
            decision = self.stepper.world.agreed(decision)
            stop.adopt(int(decision[0]))
        return bool(decision[0]), bool(decision[1]), bool(decision[2]), int(decision[3])

    def _replan(self) -> int:
        step = self.progress.step
        measured = self._is_measured()
        # Of repeated steps it is known whether the plan was revised: what the journal does not hold was not.
        repeated = step <= max(self.plan.journalled_until, self.decided_until)
        if self.limit_seconds is None or repeated or not measured:
            return -1
        # The step in flight has not been paid for yet, and evaluations and checkpoints will take their share again.
        in_flight = self._step_seconds() if self._in_flight is not None else 0.0
        left = self.limit_seconds - self.reserve() - self.clock.seconds() - in_flight
        if self.clock.kind == "wall" and self.timed_seconds:
            left *= self.timed_seconds / (self.timed_seconds + self.paused_seconds)
        progress, planned = self.plan.progress(step), self.plan.total_steps(step) - step
        estimate = remaining_steps(left, progress, [s.until for s in self.stages], self._stage_seconds())
        # The limit is hard: no more than a fiftieth of it is given to the decay when time was lost all at once.
        floor = min(decay_steps(step, progress), int(OVERRUN * self.limit_seconds / self._step_seconds()))
        if estimate < floor:
            if planned <= floor:  # decided before
                return -1
            self.event(
                f"the length of {self.limit_seconds:.0f} s cannot be met: {floor} more steps are taken, so that the "
                f"learning rate decays"
            )
            return floor
        since = self.clock.seconds() - self.plan.revisions[-1].elapsed_seconds
        return estimate if should_revise(planned, estimate, since, self.limit_seconds) else -1

    def _is_measured(self) -> bool:
        """Return whether measured steps replace the dry step's estimate. A plan of few steps waits for one only."""
        few = self.plan.total_steps(self.progress.step) <= 4 * MEASURED_STEPS
        return len(self.recent) >= (1 if few else MEASURED_STEPS)

    def _step_seconds(self) -> float:
        if not self._is_measured():
            return self.stages[self._stage].dry_seconds
        return statistics.median(self.recent)

    def _stage_seconds(self) -> list[float]:
        """Seconds per step of every stage: the dry steps' estimates, scaled by what this stage really takes."""
        factor = self._step_seconds() / self.stages[self._stage].dry_seconds
        return [stage.dry_seconds * factor for stage in self.stages]

    def _start_intervals(self) -> None:
        start = self.position()
        self.save_every = Every(self.config.checkpoint.every, start)
        self.evaluate_every = Every(self.config.evaluate.every, start)

    def _resume(self) -> None:
        self.clock.start()
        self._lap = DeviceEvent(self.stepper.world.device)

    def _close_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None
