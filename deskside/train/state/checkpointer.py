"""Save and restore the state of a run.

A checkpoint contains the weights, their average if there is one, the optimizer state, the position in the data, the
clock and the guard. It needs no state of random number generators: the initial weights are a function of the seed,
random numbers in a step are a function of (seed, step), and the order of the data is a function of (seed, epoch,
sequence length, position). With deterministic kernels, a resumed run is therefore bit-identical to an uninterrupted
one.

With `checkpoint.background`, training waits only until the state is copied to host memory (`staging.py`). A thread
writes the copy. Steps are launched meanwhile, because file operations, checksums and safetensors release Python's
interpreter lock; and unlike a separate process, the thread ends if the run is killed. One checkpoint is written at a
time. If the run is killed meanwhile, the steps since the checkpoint before are lost.
"""

import contextlib
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from deskside.config.base import Part, first_problem
from deskside.optim.build import Optimizer
from deskside.optim.groups import trained_parameters
from deskside.train.loop.callbacks import RunLog
from deskside.train.loop.clock import Clock, Every, Position
from deskside.train.loop.train_context import TrainContext
from deskside.train.loop.trainer import TrainProgress
from deskside.train.parallel import local_processes
from deskside.train.state.staging import Staging
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import plural
from deskside.utils.host_memory import usable_bytes
from deskside.weights import checkpoint as files
from deskside.weights.checkpoint import Tensors, load_weights
from deskside.weights.checkpoint_folder import (
    AVERAGE,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Checkpoint,
    Damaged,
    find,
    folder_name,
)

POLL_SECONDS = 0.1  # interval at which a wait for a checkpoint checks for signals
PRECISION = "precision/"  # prefix of the recipe's tensors, such as delayed scales, in the optimizer's file


class _GuardState(Part):
    norms: list[tuple[int, float]]
    in_a_row: NonNegativeInt


class _AverageState(Part):
    """Schema of `WeightAverage.state`."""

    updates: PositiveInt
    progress: Annotated[float, Field(ge=0, le=1)]
    blend: Annotated[float, Field(ge=0, le=1)]
    by_blend: list[dict[str, float | None]]


class _State(Part):
    """Schema of a checkpoint's state.json.

    rows: the number of rows used at each sequence length. validation: the validation loss, if it was evaluated at this
    step for `checkpoint.keep_best`.
    """

    schema_version: Literal[1]
    step: NonNegativeInt
    tokens: NonNegativeInt
    rows: dict[Annotated[int, Field(gt=0)], NonNegativeInt]
    rollbacks: NonNegativeInt
    clock_seconds: NonNegativeFloat
    guard: _GuardState
    optimizer: dict[str, Any]
    permanent: bool
    validation: float | None = None
    average: _AverageState | None = None


@dataclass(frozen=True)
class _Write:
    """A checkpoint that is being written. copied: seconds of the copy; written: those of writing, when it is done."""

    step: int
    copied: float
    written: Future[float]


class Checkpointer:
    """Saves and restores the state of the run that `log` belongs to.

    As a context manager, it waits at the end for a checkpoint that is being written, also after an error.

    Attributes:
        timings: Seconds of copying and of writing checkpoints, by their names in metrics.jsonl. The trainer moves them
            into its next row.
        best: Lowest validation loss of a checkpoint, and its step; None without `checkpoint.keep_best`.
        foreground_reason: Why checkpoints are written while training waits; None if they are not, or before `prepare`.
    """

    def __init__(self, context: TrainContext, optimizer: Optimizer, clock: Clock, log: RunLog):
        self.config, self.world, self.model = context.config, context.world, context.model
        self.precision, self.guard, self.average = context.precision, context.guard, context.average
        self.optimizer, self.clock, self.log, self.run = optimizer, clock, log, log.run
        self.timings: dict[str, float] = {}
        self.best: tuple[float, int] | None = None
        self.foreground_reason: str | None = None
        self._permanent = Every(self.config.checkpoint.keep_every, Position(0, 0, 0.0))
        self._writes = self.world.sharded or self.world.is_rank_zero
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._staging: Staging | None = None
        self._group: dist.ProcessGroup | None = None  # for the messages between the threads of sharded runs
        self._write: _Write | None = None
        self._warned = False

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        # Only an error leaves the block without `finish`. That error is raised, so that of the write is only logged.
        if self._write is not None and (failure := self._write.written.exception()) is not None:
            with contextlib.suppress(RunError):  # a full disk has no room for the event either
                self.log.say(str(failure))

    def prepare(self) -> None:
        """Create the optimizer's state, and the host memory to write checkpoints in the background if configured.

        Every rank calls this before the first `save`. Raises UsageError or RunError if checkpoint.background is true
        and the host lacks the memory.
        """
        self.optimizer.create_state()  # before the first step it has none, but a rollback to step 0 must reset it
        background, reason = self.config.checkpoint.background, None
        if background is False:
            self.foreground_reason = "checkpoint.background is false"
            return
        groups, _ = self._tensors()  # on every rank, because replicas that share Muon send their momentum
        if self.average is not None:
            groups["average"] = self.average.tensors
        usable = self.world.broadcast_result(usable_bytes)  # before the first of them allocates
        if self._writes:
            try:
                processes = local_processes() if self.world.sharded else 1
                self._staging = Staging(list(groups.values()), self.world.device, usable, processes)
            except (UsageError, RunError) as error:
                if background is True:
                    raise
                reason = str(error)
        if self.world.sharded:
            if self.world.all_reduce_min(int(reason is None)):
                self._group = dist.new_group(backend="gloo")
            else:
                self._staging, reason = None, reason or "another process lacks the host memory"
        if reason is not None:
            self.foreground_reason = reason
            self.log.say(f"training waits while checkpoints are written ({reason})")

    def is_best(self, validation: float) -> bool:
        """Return True if a checkpoint of this validation loss must be kept as the best one, the same on all ranks."""
        if not self.config.checkpoint.keep_best:
            return False
        is_lower = math.isfinite(validation) and (self.best is None or validation < self.best[0])
        return bool(self.world.broadcast([float(is_lower)])[0])

    def save(self, progress: TrainProgress, seconds: float, validation: float | None = None) -> None:
        """Save a checkpoint and delete old ones. In the background, return as soon as the state is copied.

        seconds: the clock. validation: the validation loss if it `is_best`.

        Raises RunError if the checkpoint cannot be written, or the one before it could not.
        """
        if self._write is not None and not self._write.written.done() and not self._warned:
            self._warned = True
            self.log.say(
                f"training waits: the checkpoint of step {self._write.step} is still being written, so "
                f"checkpoint.every ({self.config.checkpoint.every}) is shorter than writing takes"
            )
        self.finish()
        if validation is not None:
            self.best = validation, progress.step
        groups, data = self._tensors()
        state = _State(
            schema_version=1,
            step=progress.step,
            tokens=progress.tokens,
            rows=progress.rows,
            rollbacks=progress.rollbacks,
            clock_seconds=seconds,
            guard=_GuardState(**self.guard.state()),
            optimizer=data,
            permanent=self._permanent.due(Position(progress.step, progress.tokens, seconds)),
            validation=validation,
            average=self.average.state() if self.average is not None and self.average.updates else None,
        ).model_dump(mode="json")
        with self.world.wait_at_end():  # a slow disk may take longer than a collective waits
            if self._staging is not None:
                began = time.perf_counter()
                groups = dict(zip(groups, self._staging.copy(list(groups.values())), strict=True))
                copied = time.perf_counter() - began
                future = self._thread.submit(self._publish, progress.step, groups, state)
                self._write = _Write(progress.step, copied, future)
                self.timings["checkpoint_copy_seconds"] = copied
            elif self._writes:
                written = self._publish(progress.step, groups, state)
                self.timings["checkpoint_write_seconds"] = written
                self.log.event(f"checkpoint of step {progress.step} saved: written in {written:.2f} s")

    def save_now(self, progress: TrainProgress, seconds: float, validation: float | None = None) -> None:
        """Save a checkpoint and return when it is published. Otherwise like `save`."""
        self.finish()
        self.save(progress, seconds, validation)
        self.finish()

    @property
    def has_written(self) -> bool:
        """True if a checkpoint in the background was written, or failed, since the last `finish`."""
        return self._write is not None and self._write.written.done()

    def finish(self) -> None:
        """Wait until the last checkpoint is published. Every rank calls this. Raises RunError if it was not written."""
        with self.world.wait_at_end():
            if self._write is not None:
                # If a signal ends this, `__exit__` must know of the write. Python handles a signal that arrives just
                # before the thread blocks only when the thread wakes, so the wait has a timeout.
                while not wait([self._write.written], timeout=POLL_SECONDS).done:
                    pass
                write, self._write = self._write, None
                written = write.written.result()
                self.timings["checkpoint_write_seconds"] = written
                self.log.event(
                    f"checkpoint of step {write.step} saved: copied in {write.copied:.2f} s, written in {written:.2f} s"
                )

    def load_newest(self) -> TrainProgress | None:
        """Restore everything from the newest valid checkpoint. Return None if there is none and no step was logged.

        Raises RunError if steps were logged but no checkpoint is there, or if the checkpoint cannot be used.
        """
        checkpoint = self._newest_good()
        if checkpoint is None:
            if steps := max((row["step"] for row in self.run.read_metrics()), default=0):
                raise RunError(
                    f"{self.run.checkpoints}: contains no checkpoint, but {self.run.metrics.name} has "
                    f"{plural(steps, 'step')}; restore the checkpoints, or start a new run"
                )
            return None
        state = _read_state(checkpoint)
        assert checkpoint.sharded == self.world.sharded  # a run never changes its parallel.mode
        if checkpoint.sharded:
            self.optimizer.create_state()
            tensors, _ = self.optimizer.state_dict_flat()
            groups = {"model": self.weights(), "optimizer": tensors}
            if self.average is not None and state.average is not None:
                groups["average"] = self.average.tensors
            files.load_sharded(checkpoint, groups)
            self.optimizer.load_state_dict_flat(tensors, state.optimizer)
            self._restore_average(state.average, groups.get("average", {}))
        else:
            load_weights(
                self.model, files.load_tensors(checkpoint, WEIGHTS, self.world.device), trainable_only=True
            )
            # Offloaded state stays on the host, because it may exceed the GPU's memory.
            device = torch.device("cpu") if self.config.optim.offload else self.world.device
            tensors = files.load_tensors(checkpoint, OPTIMIZER, device)
            names = [name for name in tensors if name.startswith(PRECISION)]
            self.precision.scales.load_state_dict({n.removeprefix(PRECISION): tensors.pop(n) for n in names})
            self.optimizer.load_state_dict_flat(tensors, state.optimizer)
            tensors = {}
            if self.average is not None and state.average is not None:
                tensors = files.load_tensors(checkpoint, AVERAGE, torch.device("cpu"))
            self._restore_average(state.average, tensors)
        if self.config.checkpoint.keep_best:
            self.best = self.world.broadcast_result(self._find_best)
        self.guard.restore(state.guard.model_dump())
        self.clock.restore(state.clock_seconds)
        progress = TrainProgress(state.step, state.tokens, dict(state.rows), state.rollbacks)
        start = Position(progress.step, progress.tokens, state.clock_seconds)
        self._permanent = Every(self.config.checkpoint.keep_every, start)
        return progress

    def _restore_average(self, state: _AverageState | None, tensors: Tensors) -> None:
        if self.average is not None and state is not None:
            self.average.load(tensors, state.model_dump())
        elif self.average is not None:
            self.average.clear()

    def roll_back(self) -> TrainProgress:
        """Restore the newest valid checkpoint in the middle of a run. Raises RunError if there is none."""
        self.finish()
        seconds = self.clock.seconds()
        progress = self.load_newest()
        if progress is None:
            raise RunError(
                "the run must roll back, but has no valid checkpoint; lower --optim.lr and start again"
            )
        self.clock.set_after_rollback(seconds)
        if self.world.is_rank_zero:
            self.run.cut_metrics(progress.step)
        self.world.barrier()
        return progress

    def weights(self) -> Tensors:
        """Return the trainable parameters by name, tied ones once.

        The frozen weights of a run with adapters never change; weights/frozen_base.py has written them already.
        """
        return {name: parameter.detach() for name, parameter in trained_parameters(self.model).items()}

    def _tensors(self) -> tuple[dict[str, Tensors], dict[str, Any]]:
        """Return the tensors of a checkpoint by group (model, optimizer with recipe, average; empty before its first
        update), and the optimizer's JSON data."""
        tensors, data = self.optimizer.state_dict_flat()
        tensors |= {PRECISION + name: tensor for name, tensor in self.precision.scales.state_dict().items()}
        groups = {"model": self.weights(), "optimizer": tensors}
        if self.average is not None:
            self.average.wait()
            groups["average"] = self.average.tensors if self.average.updates else {}
        return groups, data

    def _publish(self, step: int, groups: Mapping[str, Tensors], state: dict[str, Any]) -> float:
        """Write a checkpoint and delete old ones. Return the seconds. May run while training changes the state."""
        began, folder = time.perf_counter(), self.run.checkpoints
        if self.world.is_rank_zero:
            self.run.sync_metrics()
        written = {name: tensors for name, tensors in groups.items() if tensors or name != "average"}
        files.save(folder, step, written, state, self.world.sharded, self._group)
        if self.world.is_rank_zero:
            files.prune(folder, self.config.checkpoint.keep, self._is_kept)
        return time.perf_counter() - began

    def return_to_best(self) -> None:
        """Load the weights of the best checkpoint and delete the later ones. Every rank calls this at the end of a run.

        The optimizer's state is not restored. A run that is killed afterwards continues from this checkpoint. Raises
        RunError if the checkpoint is damaged.
        """
        assert self.best is not None
        self.finish()
        step, folder = self.best[1], self.run.checkpoints
        checkpoint = Checkpoint(folder / folder_name(step), step)
        try:
            files.verify_weights(checkpoint, "raw")
        except Damaged as damage:
            raise RunError(f"{damage}; restore it, or delete {checkpoint.path} and resume the run") from None
        weights = files.load_tensors(checkpoint, WEIGHTS, self.world.device)
        load_weights(self.model, weights, trainable_only=True)
        self.precision.forget_weights()
        self.world.barrier()
        if self.world.is_rank_zero:
            files.delete_newer(folder, step)
        self.world.barrier()

    def _find_best(self) -> tuple[float, int] | None:
        """Return the lowest validation loss that a checkpoint of the run records, and its step."""
        found = []
        for checkpoint in find(self.run.checkpoints):
            try:
                loss = files.load_state(checkpoint).get("validation")
            except RunError:  # damaged, and of no use
                continue
            if loss is not None:
                found.append((float(loss), checkpoint.step))
        return min(found, default=None)

    def _is_kept(self, checkpoint: Checkpoint) -> bool:
        return _is_permanent(checkpoint) or (self.best is not None and checkpoint.step == self.best[1])

    def _newest_good(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, as chosen by rank 0, which renames newer ones."""
        folder, step = self.run.checkpoints, -1
        if self.world.is_rank_zero:
            checkpoint = files.newest_good(folder, self.log.say)
            if checkpoint is not None:
                step = checkpoint.step
                for path in files.set_aside(folder, newer_than=step):
                    self.log.event(f"the damaged checkpoint was renamed to {path}")
        step = int(self.world.broadcast([float(step)])[0])
        return Checkpoint(folder / folder_name(step), step) if step >= 0 else None


def _read_state(checkpoint: Checkpoint) -> _State:
    """Return the content of state.json. Raises RunError if it was edited or written by another version."""
    path = checkpoint.path / STATE
    try:
        state = _State.model_validate(files.load_state(checkpoint))
    except ValidationError as error:
        raise RunError(
            f"{path}: {first_problem(error)}; restore it, or delete {checkpoint.path} to resume from an older one"
        ) from None
    if state.step != checkpoint.step:
        raise RunError(f"{path}: belongs to step {state.step}; restore it, or delete {checkpoint.path}")
    return state


def _is_permanent(checkpoint: Checkpoint) -> bool:
    try:
        return files.load_state(checkpoint).get("permanent") is True
    except RunError:  # a damaged checkpoint is of no use
        return False
