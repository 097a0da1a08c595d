"""Save and restore the state of a run.

A checkpoint contains the weights, the optimizer state, the position in the data, the clock and the guard. It needs no
state of random number generators: the initial weights are a function of the seed, random numbers in a step are a
function of (seed, step), and the order of the data is a function of (seed, epoch, sequence length, position). With
deterministic kernels, a resumed run is therefore bit-identical to an uninterrupted one.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError
from torch import Tensor

from deskside.config.base import Part, first_problem
from deskside.optim.build import Optimizer
from deskside.optim.groups import clean_name
from deskside.train.loop.callbacks import RunLog
from deskside.train.loop.clock import Clock, Every, Position
from deskside.train.loop.trainer import TrainProgress
from deskside.train.objective import TrainContext
from deskside.utils.errors import RunError
from deskside.weights import checkpoint as files
from deskside.weights.checkpoint import OPTIMIZER, WEIGHTS, Checkpoint, folder_name, load_weights

PRECISION = "precision/"  # prefix of the recipe's tensors, such as delayed scales, in the optimizer's file


class _GuardState(Part):
    norms: list[tuple[int, float]]
    in_a_row: NonNegativeInt


class _State(Part):
    """Schema of a checkpoint's state.json. `rows` counts the rows used at each sequence length."""

    schema_version: Literal[1]
    step: NonNegativeInt
    tokens: NonNegativeInt
    rows: dict[Annotated[int, Field(gt=0)], NonNegativeInt]
    rollbacks: NonNegativeInt
    clock_seconds: NonNegativeFloat
    guard: _GuardState
    optimizer: dict[str, Any]
    permanent: bool


class Checkpointer:
    """Saves and restores the state of the run that `log` belongs to."""

    def __init__(self, context: TrainContext, optimizer: Optimizer, clock: Clock, log: RunLog):
        self.config, self.world, self.model = context.config, context.world, context.model
        self.precision, self.guard = context.precision, context.guard
        self.optimizer, self.clock, self.log, self.run = optimizer, clock, log, log.run
        self._permanent = Every(self.config.checkpoint.keep_every, Position(0, 0, 0.0))

    def save(self, progress: TrainProgress, seconds: float) -> None:
        """Write a checkpoint and delete old ones. seconds: the clock. Raises RunError if writing fails."""
        self.optimizer.create_state()  # before the first step it has none, but a rollback to step 0 must reset it
        tensors, data = self.optimizer.state_dict_flat()
        tensors |= {PRECISION + name: tensor for name, tensor in self.precision.scales.state_dict().items()}
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
        ).model_dump(mode="json")
        folder = self.run.checkpoints
        if self.world.is_rank_zero:
            self.run.sync_metrics()
        if self.world.sharded or self.world.is_rank_zero:
            files.save(folder, progress.step, self.weights(), tensors, state, self.world.sharded)
        if self.world.is_rank_zero:
            files.prune(folder, self.config.checkpoint.keep, _is_permanent)
            self.log.event(f"checkpoint of step {progress.step} saved")
        self.world.barrier()

    def load_newest(self) -> TrainProgress | None:
        """Restore everything from the newest valid checkpoint. Return None if there is none and no step was logged.

        Raises RunError if steps were logged but no checkpoint is there, or if the checkpoint cannot be used.
        """
        checkpoint = self._newest_good()
        if checkpoint is None:
            if steps := max((row["step"] for row in self.run.read_metrics()), default=0):
                raise RunError(
                    f"{self.run.checkpoints}: contains no checkpoint, but {self.run.metrics.name} has {steps} steps; "
                    "restore the checkpoints, or start a new run"
                )
            return None
        state = _read_state(checkpoint)
        assert checkpoint.sharded == self.world.sharded  # a run never changes its parallel.mode
        if checkpoint.sharded:
            self.optimizer.create_state()
            tensors, _ = self.optimizer.state_dict_flat()
            files.load_sharded(checkpoint, self.weights(), tensors)
            self.optimizer.load_state_dict_flat(tensors, state.optimizer)
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
        self.guard.restore(state.guard.model_dump())
        self.clock.restore(state.clock_seconds)
        progress = TrainProgress(state.step, state.tokens, dict(state.rows), state.rollbacks)
        start = Position(progress.step, progress.tokens, state.clock_seconds)
        self._permanent = Every(self.config.checkpoint.keep_every, start)
        return progress

    def roll_back(self) -> TrainProgress:
        """Restore the newest valid checkpoint in the middle of a run. Raises RunError if there is none."""
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

    def weights(self) -> dict[str, Tensor]:
        """Return the trainable parameters by name, tied ones once.

        The frozen weights of a run with adapters never change; weights/frozen_base.py has written them already.
        """
        return {
            clean_name(name): parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

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
    path = checkpoint.path / files.STATE
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
