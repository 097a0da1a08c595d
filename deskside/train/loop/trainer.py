"""The training loop.

The host runs one step ahead: it launches step k + 1 and only then reads the metrics of step k, so the GPU never waits
for the host. Evaluation, checkpoints and the end of the run first wait for the pending step. Step times are measured
between `DeviceEvent`s, because the host may read the metrics long after they were ready.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deskside.budget.adapters import training_flops_per_token
from deskside.config.step_options import adapter_spec
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.optim.lr_schedule import lr_factor
from deskside.train.loop.callbacks import RunLog
from deskside.train.loop.clock import (
    OVERRUN,
    Clock,
    Every,
    Position,
    StepPlan,
    decay_steps,
    remaining_steps,
    should_revise,
)
from deskside.train.loop.guard import Diverged
from deskside.train.loop.overfitting import validation_loss
from deskside.train.loop.routers import LAYER_METRICS_EVERY
from deskside.train.loop.stage_work import StageWork
from deskside.train.loop.step import DeviceEvent, StepMetrics, Stepper
from deskside.train.objective import Batches
from deskside.utils.errors import OutsideError, RunError
from deskside.utils.format import plural
from deskside.utils.signals import StopSignal

OVERFITTING = "overfitting"  # reason of the last revision of a run that ends early
RECENT_STEPS = 20  # number of step times in the throughput estimate
MEASURED_STEPS = 5  # number of step times that replace the estimate from the dry steps, except in short plans


@dataclass
class TrainProgress:
    """Progress of a run. `rows` counts the rows used at each sequence length, which is the position in the data."""

    step: int = 0
    tokens: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    rollbacks: int = 0


class SavesProgress(Protocol):
    """The part of a `Checkpointer` that the trainer uses."""

    timings: dict[str, float]

    @property
    def has_written(self) -> bool: ...
    def is_best(self, validation: float) -> bool: ...
    def save(self, progress: TrainProgress, seconds: float, validation: float | None = None) -> None: ...
    def save_now(self, progress: TrainProgress, seconds: float, validation: float | None = None) -> None: ...
    def finish(self) -> None: ...
    def roll_back(self) -> TrainProgress: ...


@dataclass
class RunLength:
    """The plan of steps, the clock, and the time limit of a run.

    `limit_seconds`: the length if it was given in time, else None. `reserve` returns the part of it that is needed
    after the last step. Up to step `decided_until`, which an earlier process reached, the plan is not revised again.
    `write_plan` writes the revised plan to plan.json. `stops_early` returns True on rank 0 if the run must end soon.
    """

    plan: StepPlan
    clock: Clock
    limit_seconds: float | None = None
    reserve: Callable[[], float] = lambda: 0.0
    decided_until: int = 0
    write_plan: Callable[[StepPlan], None] = lambda plan: None
    stops_early: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class PendingStep:
    """A step that was launched, and whose metrics the host has not read yet."""

    stage: int
    row: dict[str, Any]
    metrics: StepMetrics


class TooManySkips(Exception):
    """The number of consecutive skipped steps reached the guard's limit."""


class Trainer:
    """Runs steps until the plan is complete or a stop is requested.

    evaluate: evaluates on the validation split and returns metrics for the step's row. complete_row: adds MFU, memory
    and power to a row of metrics, given the model's FLOP/s, or None.
    """

    def __init__(
        self,
        stepper: Stepper,
        stages: Sequence[StageWork],
        length: RunLength,
        progress: TrainProgress,
        checkpointer: SavesProgress,
        log: RunLog,
        evaluate: Callable[[], dict[str, float]],
        complete_row: Callable[[dict[str, Any], float | None], dict[str, Any]],
    ):
        self.config, self.stepper, self.stages, self.length = stepper.config, stepper, stages, length
        self.plan, self.clock, self.progress = length.plan, length.clock, progress
        self.checkpointer, self.log = checkpointer, log
        self.evaluate, self.complete_row = evaluate, complete_row
        # GRPO counts a short answer as a whole row and KTO runs more forward passes, so their FLOPs are not known.
        self._flops = (
            [
                training_flops_per_token(self.config.model, stage.sequence_length, adapter_spec(self.config))
                for stage in stages
            ]
            if not stepper.objective.reads_weights
            else None
        )
        self._start_intervals()
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.timed_seconds, self.timed_tokens, self.timed_flops, self.paused_seconds = 0.0, 0, 0.0, 0.0
        # The end of a warm-up in steps is a fraction of the first plan, so that revisions do not move it.
        self.first_steps = max(1, self.plan.total_steps(0))
        self._pending: PendingStep | None = None
        self._last_end: DeviceEvent | None = None  # of the last step that was read, or of a pause
        self._stage = -1
        self._saved_step = progress.step  # of the last checkpoint
        self._loader: Batches | None = None

    def run(self, stop: StopSignal) -> str:
        """Train. Return "finished" or, after everything was saved, `stop.requested`."""
        try:
            self._resume()
            while not self.plan.done(self.progress.step):
                try:
                    self.one_step()
                    if self.after_step(stop):
                        return str(stop.requested)
                except TooManySkips as trouble:
                    self.roll_back(str(trouble))
            return "finished"
        except OutsideError:
            self._save_before_end()
            raise
        finally:
            self.clock.stop()
            self._close_loader()

    def one_step(self) -> None:
        """Launch the next step, then read the metrics of the previous one."""
        state, step = self.progress, self.progress.step + 1
        stage, batches = self._enter_stage()
        progress = self.plan.progress(state.step)
        factor = lr_factor(self.config.schedule, progress, self.first_steps)
        factor *= self.config.batch_lr_factor(stage.tokens_per_step)
        self.stepper.set_progress(factor, progress, state.step)
        metrics = self.stepper.run(next(batches), step)
        self.stepper.average_weights(step, progress)

        state.step = step
        state.tokens += stage.tokens_per_step
        rows = stage.tokens_per_step // stage.sequence_length
        state.rows[stage.sequence_length] = state.rows.get(stage.sequence_length, 0) + rows
        previous = self._pending
        lr = next(iter(self.stepper.optimizer.lr_groups().values()))
        row = {"step": step, "tokens": state.tokens, "lr": lr}
        self._pending = PendingStep(self._stage, row, metrics)
        if previous is not None:
            self._log(self._read(previous))

    def after_step(self, stop: StopSignal) -> bool:
        """Evaluate, save or revise the plan if due; rank 0 decides for all. Return True if the run must stop now."""
        must_stop, evaluate, save, written, remaining = self._decide(stop)
        step = self.progress.step
        if written:
            self.checkpointer.finish()
        if remaining >= 0:
            reason = OVERFITTING if self.length.stops_early() else "throughput changed"
            self.plan.revise(step, remaining, self.clock.seconds(), self._step_seconds(), reason)
            self.length.write_plan(self.plan)
        done = self.plan.done(step)
        if not (must_stop or evaluate or save or done):
            return False
        assert self._pending is not None
        pending, self._pending = self._pending, None
        row = self._read(pending)
        self.stepper.wait_for_weights()
        pause_started = time.perf_counter()
        self.clock.stop()
        best: float | None = None  # the validation loss if it is the lowest so far
        try:
            if evaluate and not done:
                row |= self._evaluate()
                loss = validation_loss(row)
                best = loss if loss is not None and self.checkpointer.is_best(loss) else None
        finally:
            self._log(row)
        if must_stop and not done:
            self.checkpointer.save_now(self.progress, self.clock.seconds(), best)
        elif (save or best is not None) and not done:
            self.checkpointer.save(self.progress, self.clock.seconds(), best)
            self._saved_step = step
        self.paused_seconds += time.perf_counter() - pause_started
        self._resume()
        return must_stop and not done

    def _evaluate(self) -> dict[str, float]:
        """Evaluate, in the final model's window if losses of different stages are compared."""
        if self.config.checkpoint.keep_best or self.config.evaluate.stop_early:
            with self.stepper.final_window():
                return self.evaluate()
        return self.evaluate()

    def _save_before_end(self) -> None:
        """Log the last step and save a checkpoint of it, if there is none.

        An error that prevents this is only logged, because the run ends with the error that led here. After too many
        skipped steps nothing is saved: the last checkpoint is the one that the run would have gone back to.
        """
        self.clock.stop()
        try:
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._log(self._read(pending))
            self.stepper.wait_for_weights()
            if self.progress.step != self._saved_step:
                self.checkpointer.save_now(self.progress, self.clock.seconds())
                self.log.say(f"saved at step {self.progress.step}")
        except (TooManySkips, RunError) as reason:
            with contextlib.suppress(RunError):  # a full disk has no room for the event either
                self.log.say(
                    f"not saved at step {self.progress.step}: {reason}; a resumed run begins at the last checkpoint"
                )

    def roll_back(self, why: str) -> None:
        """Return to the last checkpoint, but continue with new data, so that the same rows do not fail again."""
        self.clock.stop()
        self.stepper.wait_for_weights()
        self._pending = None
        rollbacks, rows = self.progress.rollbacks + 1, self.progress.rows
        if rollbacks > self.config.guard.max_rollbacks:
            raise Diverged(
                f"{why}, and the run was rolled back {plural(self.config.guard.max_rollbacks, 'time')} already; "
                f"lower the learning rate (--optim.lr) or check the data near step {self.progress.step}"
            )
        self.progress = self.checkpointer.roll_back()
        self.stepper.guard.count_from_zero()
        self._saved_step = self.progress.step
        self.progress.rollbacks, self.progress.rows = rollbacks, rows
        self.log.event(f"{why}: went back to step {self.progress.step} and skipped the data in between")
        self._close_loader()
        self._start_intervals()  # repeated steps evaluate and save again
        self._resume()

    def position(self) -> Position:
        return Position(self.progress.step, self.progress.tokens, self.clock.seconds())

    def flops_per_second(self) -> float | None:
        """Return the model's mean FLOP/s over the steps of `tokens_per_second`; None if its FLOPs are not known."""
        known = self._flops is not None and self.timed_seconds
        return self.timed_flops / self.timed_seconds if known else None

    def tokens_per_second(self) -> float | None:
        """Return the mean over the steps of this process, without evaluation and checkpoints; None before the first."""
        return self.timed_tokens / self.timed_seconds if self.timed_seconds else None

    def _enter_stage(self) -> tuple[StageWork, Iterator[list[Batch]]]:
        """Return the stage of the next step and its loader, which is opened at the first step of the stage."""
        progress = self.plan.progress(self.progress.step)
        index = next((i for i, s in enumerate(self.stages) if progress < s.until), len(self.stages) - 1)
        stage = self.stages[index]
        if index != self._stage or self._loader is None:
            self._close_loader()
            self._stage = index
            self.recent.clear()
            world = self.stepper.world
            self.stepper.set_window(stage.window)
            options = LoaderOptions(
                seed=self.config.seed,
                start_row=self.progress.rows.get(stage.sequence_length, 0),
                rows_per_step=stage.tokens_per_step // stage.sequence_length,
                micro_batch_rows=stage.micro_rows,
                rank=world.reader,
                world_size=world.readers,
                device=world.device,
                document_mask=self.config.data.document_mask,
                prefetch=self.config.data.prefetch,
            )
            self._loader = self.stepper.objective.loader(stage.dataset, options)
            self._batches = iter(self._loader)
            if len(self.stages) > 1:
                self.log.event(
                    f"stage {index + 1} of {len(self.stages)}: sequences of {stage.sequence_length} tokens"
                    + (
                        f", {stage.tokens_per_step:,} per step"
                        if self.config.schedule.batch_growth > 1
                        else ""
                    )
                )
        return stage, self._batches

    def _read(self, step: PendingStep) -> dict[str, Any]:
        """Wait for a step's metrics and complete its row. Raises TooManySkips."""
        row = step.row
        loss, norm, skipped = step.metrics.read()
        why_skipped = self.stepper.guard.record(row["step"], loss, norm, skipped)
        tokens_per_second = flops_per_second = None
        if self._last_end is not None:
            seconds = step.metrics.end.seconds_since(self._last_end)
            stage = self.stages[step.stage]
            if step.stage == self._stage:  # the host may have launched the first step of the next stage
                self.recent.append(seconds)
            tokens_per_second = stage.tokens_per_step / seconds
            self.timed_seconds += seconds
            self.timed_tokens += stage.tokens_per_step
            if self._flops is not None:
                flops_per_second = tokens_per_second * self._flops[step.stage]
                self.timed_flops += stage.tokens_per_step * self._flops[step.stage]
        self._last_end = step.metrics.end
        if skipped:
            self.log.event(f"step {row['step']} skipped: {why_skipped}")
        if self.stepper.guard.too_many_skips:
            raise TooManySkips(f"{plural(self.config.guard.max_skips, 'step')} in a row had to be skipped")
        row |= {"seconds": self.clock.seconds(), "loss": loss, "grad_norm": norm}
        row |= {"skipped": skipped, "tokens_per_second": tokens_per_second}
        row |= self.stepper.objective.metrics(step.metrics.metric_sums(), step.metrics.count)
        by_layer = row["step"] % LAYER_METRICS_EVERY == 0 or self.plan.done(row["step"])
        row |= self.stepper.routers.metrics(step.metrics.router_sums(), by_layer)
        return self.complete_row(row, flops_per_second)

    def _log(self, row: dict[str, Any]) -> None:
        row |= self.checkpointer.timings
        self.checkpointer.timings.clear()
        self.log.step(row, self.plan.total_steps(row["step"]))

    def _decide(self, stop: StopSignal) -> tuple[bool, bool, bool, bool, int]:
        """Return (stop, evaluate, save, a checkpoint was written, new number of remaining steps or -1), equal on all
        ranks."""
        now = self.position()
        decision = [
            float(stop.number),
            float(self.evaluate_every.due(now)),
            float(self.save_every.due(now)),
            float(self.checkpointer.has_written),
            float(self._replan()),
        ]
        if self.stepper.world.size > 1:
            decision = self.stepper.world.broadcast(decision)
            stop.adopt(int(decision[0]))
        must_stop, evaluate, save, written = map(bool, decision[:4])
        return must_stop, evaluate, save, written, int(decision[4])

    def _replan(self) -> int:
        """Return the number of remaining steps if the plan has to be revised, else -1."""
        step, limit = self.progress.step, self.length.limit_seconds
        if self.plan.revisions[-1].reason == OVERFITTING:
            return -1
        if self.length.stops_early():
            remaining = decay_steps(step, self.plan.progress(step))
            return min(remaining, self.plan.total_steps(step) - step)
        # Repeated steps are not planned again: plan.json already has their revisions.
        repeated = step <= max(self.plan.last_revision_step, self.length.decided_until)
        if limit is None or repeated or not self._is_measured():
            return -1
        # The pending step still has to run. Evaluations and checkpoints will take the same share of time as so far.
        pending = self._step_seconds() if self._pending is not None else 0.0
        left = limit - self.length.reserve() - self.clock.seconds() - pending
        if self.clock.kind == "wall" and self.timed_seconds:
            left *= self.timed_seconds / (self.timed_seconds + self.paused_seconds)
        progress, planned = self.plan.progress(step), self.plan.total_steps(step) - step
        # The dry-step times of all stages, scaled by how much the measured time of this stage differs.
        factor = self._step_seconds() / self.stages[self._stage].dry_seconds
        stage_seconds = [stage.dry_seconds * factor for stage in self.stages]
        estimate = remaining_steps(left, progress, [s.until for s in self.stages], stage_seconds)
        # If much time was lost at once, the run may exceed its limit for the decay, but by no more than OVERRUN.
        minimum = min(decay_steps(step, progress), int(OVERRUN * limit / self._step_seconds()))
        if estimate < minimum:
            if planned <= minimum:
                return -1
            self.log.event(
                f"the length of {limit:.0f} s cannot be met: {minimum} more steps are taken, so that the "
                f"learning rate decays"
            )
            return minimum
        since = self.clock.seconds() - self.plan.revisions[-1].elapsed_seconds
        return estimate if should_revise(planned, estimate, since, limit) else -1

    def _is_measured(self) -> bool:
        """Return True if enough steps were measured to replace the dry steps' estimate; in a short plan, one is."""
        short_plan = self.plan.total_steps(self.progress.step) <= 4 * MEASURED_STEPS
        return len(self.recent) >= (1 if short_plan else MEASURED_STEPS)

    def _step_seconds(self) -> float:
        """Return the seconds of a step in this stage: the median of recent steps, or that from its dry steps."""
        if not self._is_measured():
            return self.stages[self._stage].dry_seconds
        return statistics.median(self.recent)

    def _start_intervals(self) -> None:
        start = self.position()
        self.save_every = Every(self.config.checkpoint.every, start)
        self.evaluate_every = Every(self.config.evaluate.every, start)

    def _resume(self) -> None:
        """Start the clock, and time the next step from now on."""
        self.clock.start()
        self._last_end = DeviceEvent(self.stepper.world.device)

    def _close_loader(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None
