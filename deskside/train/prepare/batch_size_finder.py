"""Find the largest micro-batch that fits in memory.

Each candidate runs a dry step: a whole step, with optimizer state, on a worst-case batch. If the run's steps have
several passes, the dry step has two, because the gradients of the first are in memory during the second. If passes will
be replayed as CUDA graphs, the memory that a captured pass keeps is reserved during the update and an evaluation's
forward. The dry step also compiles the model and gives the first estimate of the step time. If it runs out of memory, a
divisor of the rows that is at most half as large is tried with more gradient accumulation, so the effective batch size
never changes. The result is recorded in plan.json. A resumed run uses it again, if it fits the number of processes.
"""

import contextlib
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from deskside.config.gpu_batch import rows_each
from deskside.config.run import RunConfig
from deskside.kernels.compile_ahead import compile_ahead
from deskside.train import environment_record
from deskside.train.loop.stage_work import StageWork, same_shape
from deskside.train.loop.step import Stepper
from deskside.train.objective import RowDataset
from deskside.train.time_budget import DRY_SHARE, UNLIMITED, TimeBudget
from deskside.utils.errors import RunError

CPU_MICRO_TOKENS = 8192  # on a CPU, memory is no limit, and larger batches do not fit into its caches
TIMED_DRY_STEPS = 2  # at most, after the search
MAX_BATCHING_SPEEDUP = 4  # of a row in a large batch, compared with a row alone
MAX_OVERCOMMIT = 1.3  # candidates predicted to need more than this multiple of the memory are not tried


@dataclass(frozen=True)
class MicroBatch:
    """Rows per forward pass on one process, gradient accumulation steps, and the attempts of the search."""

    micro_rows: int
    accumulation: int
    attempts: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def candidates(rows: int, largest: int) -> list[int]:
    """Return divisors of `rows` up to `largest`, in descending order, each at most half of the previous one."""
    divisors = [n for n in range(min(rows, max(1, largest)), 0, -1) if rows % n == 0]
    chosen: list[int] = []
    for n in divisors:
        if not chosen or 2 * n <= chosen[-1]:
            chosen.append(n)
    return chosen


def find_micro_batch(
    dry_step: Callable[[int], float],
    rows: int,
    largest: int,
    log: Callable[[str], None],
    free_memory: Callable[[], None],
) -> MicroBatch:
    """Run `dry_step(micro_rows)` with fewer and fewer rows until it fits in memory.

    dry_step: returns seconds; raises torch.OutOfMemoryError on all processes if one runs out of memory. free_memory:
    called after a failed attempt. Raises RunError if a single row does not fit.
    """
    attempts: list[dict[str, Any]] = []
    for micro_rows in candidates(rows, largest):
        try:
            seconds = dry_step(micro_rows)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(".")[0]
            error.__traceback__ = None  # it keeps the tensors of the failed step alive
        else:
            attempts.append({"micro_rows": micro_rows, "fits": True, "seconds": seconds})
            return MicroBatch(micro_rows, rows // micro_rows, tuple(attempts))
        attempts.append({"micro_rows": micro_rows, "fits": False, "seconds": None})
        free_memory()
        if micro_rows > 1:
            log(
                f"{micro_rows} rows do not fit ({reason}): trying fewer per pass and more passes; "
                f"the batch stays the same"
            )
    raise RunError(
        "out of memory with a single row: use --compute.activation_checkpointing block, a smaller "
        "--compute.loss_chunk_tokens, --optim.weights bfloat16, --optim.offload true, --optim.gradients host, a "
        "shorter --batch.sequence_length or a smaller model; deskside plan --here names the fastest combination that "
        "fits"
    )


def free_failed_attempt(device: torch.device) -> None:
    """Free the memory of a failed attempt, including the code compiled for its shape."""
    gc.collect()
    # Importing torch._dynamo takes seconds. If it has not been imported, nothing was compiled.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class BatchSizeFinder:
    """Finds the micro-batch size of every stage.

    Args:
        modelled_memory: Predicted peak memory of a step in GiB, given the tokens in a micro-batch.
        log: Called with a line for every attempt that does not fit.
        budget: Limits the dry steps of a run whose length is given in time.
    """

    def __init__(
        self,
        config: RunConfig,
        stepper: Stepper,
        modelled_memory: Callable[[int], float],
        log: Callable[[str], None],
        budget: TimeBudget = UNLIMITED,
    ):
        self.config, self.stepper, self.modelled_memory, self.log = config, stepper, modelled_memory, log
        self.budget = budget
        self.world = stepper.world
        self._compiled: set[tuple[int, int | None]] = set()  # (sequence length, window) of steps

    def find(
        self, stages: Sequence[StageWork], recorded: Sequence[dict[str, Any]] | None = None
    ) -> list[MicroBatch]:
        """Return the micro-batch of each stage, and set the stages' `micro_rows` and `dry_seconds`.

        recorded: the results of the run that is resumed. They are reused, so that gradients are accumulated over the
        same micro-batches, unless the number of processes changed and a recorded size no longer divides the rows of a
        process.
        """
        self.stepper.optimizer.create_state()  # its memory must be in use during the search
        self.stepper.optimizer.set_progress(0.0, 0.0, 0)
        self.stepper.precision.set_active(True)
        micro_batches: list[MicroBatch] = []
        for index, stage in enumerate(stages):
            rows = self.stage_rows(stage)
            if self.grows and index and same_shape(stages[index - 1], stage):
                micro_batches.append(self.grown(stages, index, rows))
                continue
            self.stepper.set_window(stage.window)
            if not recorded:
                self.check_step_time(stage, rows)
            common = self.common_rows(stages, index) if self.grows else rows
            micro_batch = self.find_for_stage(stage, rows, common, recorded[index] if recorded else None)
            micro_batches.append(micro_batch)
            stage.micro_rows = micro_batch.micro_rows
            if self.uses_bf16_steps and self.objective_reserved_bytes():
                # `reserve_memory` emptied torch's cache. This step fills it again, before the objective measures
                # how much memory is free.
                with self.stepper.precision.high_precision():
                    self.dry_step(stage.micro_rows, stage.dataset, rows)
            stage.dry_seconds = self.step_seconds(stage, rows, micro_batch)
        self.stepper.precision.scales.reset()  # the dry steps' data is not the run's
        return micro_batches

    def stage_rows(self, stage: StageWork) -> int:
        """Return the rows of this process in a step of a stage."""
        return rows_each(stage.tokens_per_step, stage.sequence_length, self.world.readers)

    def common_rows(self, stages: Sequence[StageWork], index: int) -> int:
        """Return the largest number of rows that divides a stage's step and those of the next stages of its shape."""
        same = itertools.takewhile(lambda stage: same_shape(stages[index], stage), stages[index:])
        return math.gcd(*(self.stage_rows(stage) for stage in same))

    def stage_dry_rows(self, stage: StageWork) -> int:
        """Return the rows of a dry step with the micro-batch of a stage."""
        return self.dry_rows(stage, self.stage_rows(stage), stage.micro_rows)

    def grown(self, stages: Sequence[StageWork], index: int, rows: int) -> MicroBatch:
        """Return the micro-batch of a stage that differs from the one before only in its larger batch.

        It has the same rows per pass in more passes.

        Only the smallest batch of a shape is timed, and the largest if there is time. The times of those in between are
        interpolated.
        """
        stage, before = stages[index], stages[index - 1]
        micro_batch = MicroBatch(before.micro_rows, rows // before.micro_rows, ())
        stage.micro_rows = before.micro_rows
        if index + 1 < len(stages) and same_shape(stage, stages[index + 1]):
            return micro_batch
        first = next(i for i in range(index) if all(same_shape(s, stage) for s in stages[i:index]))
        low, span = stages[first], max(1, stage.tokens_per_step - stages[first].tokens_per_step)
        stage.dry_seconds = low.dry_seconds * stage.tokens_per_step / low.tokens_per_step
        if self.world.broadcast([float(self.budget.share(DRY_SHARE) > stage.dry_seconds)])[0]:
            stage.dry_seconds = self.dry_step(stage.micro_rows, stage.dataset, rows)
        for between in stages[first + 1 : index]:
            share = (between.tokens_per_step - low.tokens_per_step) / span
            between.dry_seconds = low.dry_seconds + share * (stage.dry_seconds - low.dry_seconds)
        return micro_batch

    def step_seconds(self, stage: StageWork, rows: int, micro_batch: MicroBatch) -> float:
        """Return the seconds of a step: the faster of up to two dry steps, or an estimate from the search.

        A run with a time limit runs only the dry steps that its budget allows. On a GPU it runs at least one, because
        the time of the search includes compilation.
        """
        micro_rows = micro_batch.micro_rows
        search_seconds = 0.0
        for attempt in micro_batch.attempts:
            if attempt["fits"] and attempt["micro_rows"] == micro_rows:
                search_seconds = attempt["seconds"]
        estimate = search_seconds * rows / self.dry_rows(stage, rows, micro_rows)
        affordable = int(min(TIMED_DRY_STEPS, self.budget.share(DRY_SHARE) / max(1e-9, estimate)))
        minimum = 0 if self.world.device.type == "cpu" and search_seconds else 1
        steps = max(minimum, int(self.world.broadcast([affordable])[0]))
        times = [self.dry_step(micro_rows, stage.dataset, rows) for _ in range(steps)]
        return min(times, default=estimate)

    def check_step_time(self, stage: StageWork, rows: int) -> None:
        """Raise UsageError early if a single step takes longer than the time left.

        One row is timed alone. In larger batches, a row is faster by at most `MAX_BATCHING_SPEEDUP`. GPUs are not
        checked, because their first pass compiles.
        """
        if self.budget.limit is None or self.world.device.type != "cpu":
            return

        def is_too_slow(row_seconds: float) -> bool:
            too_slow = rows * row_seconds / MAX_BATCHING_SPEEDUP > self.budget.left()
            return bool(self.world.broadcast([float(too_slow)])[0])

        row_seconds = self.dry_step(1, stage.dataset, 1)
        if not is_too_slow(row_seconds):
            return
        row_seconds = min(row_seconds, self.dry_step(1, stage.dataset, 1))  # the first step allocates memory
        if is_too_slow(row_seconds):
            why = f"one row takes {row_seconds:.1f} s, and a step has {rows} rows"
            raise self.budget.too_short(why, rows * row_seconds / 2)

    @property
    def uses_bf16_steps(self) -> bool:
        """True if some steps of the schedule run in BF16 instead of in the recipe's formats."""
        formats = self.stepper.precision_config
        return formats.warmup_steps > 0 or formats.bf16_from is not None

    @property
    def grows(self) -> bool:
        """True if the batch grows while the passes stay the same."""
        return self.config.schedule.batch_growth > 1 and self.config.optim.gradients != "released"

    def dry_rows(self, stage: StageWork, rows: int, micro_rows: int) -> int:
        """Return the rows of a dry step: one pass, or two if some step of this shape has several."""
        if self.grows:
            rows = rows_each(self.config.batch.tokens, stage.sequence_length, self.world.readers)
        return min(rows, 2 * micro_rows)

    def find_for_stage(
        self, stage: StageWork, rows: int, common: int, recorded: dict[str, Any] | None
    ) -> MicroBatch:
        """Return the micro-batch of one stage with `rows` rows per step on this process.

        common: rows that a pass must divide, see `common_rows`.
        """

        def dry(micro_rows: int) -> float:
            dry_rows = self.dry_rows(stage, rows, micro_rows)
            self.compile_kernels(micro_rows, stage.dataset, dry_rows)
            if self.uses_bf16_steps:
                # BF16 steps must fit too, and save more bytes for the backward pass than FP8 steps.
                with self.stepper.precision.high_precision():
                    self.dry_step(micro_rows, stage.dataset, dry_rows)
            return self.dry_step(micro_rows, stage.dataset, dry_rows)

        # A resumed run may have a different number of processes, and therefore of rows per process.
        if (
            recorded
            and recorded["micro_rows"] * recorded["accumulation"] == rows
            and common % recorded["micro_rows"] == 0
        ):
            micro_batch = MicroBatch(**{**recorded, "attempts": tuple(recorded["attempts"])})
            dry(micro_batch.micro_rows)
            return micro_batch

        def dry_with_reserve(micro_rows: int) -> float:
            with self.reserve_memory(), self.reserve_captured():
                return dry(micro_rows)

        if self.config.optim.gradients == "released":  # the step is one pass
            try:
                seconds = dry_with_reserve(rows)
            except torch.OutOfMemoryError:
                raise RunError(
                    f"out of memory with a step of one pass of {rows * stage.sequence_length:,} tokens, which "
                    "--optim.gradients released needs: use fewer --batch.tokens, or --optim.gradients host"
                ) from None
            return MicroBatch(rows, 1, ({"micro_rows": rows, "fits": True, "seconds": seconds},))
        first, device = self.first_candidate(stage, common), self.world.device
        found = find_micro_batch(
            dry_with_reserve, common, first, self.log, lambda: free_failed_attempt(device)
        )
        return replace(found, accumulation=rows // found.micro_rows)

    def compile_kernels(self, micro_rows: int, dataset: RowDataset, rows: int) -> None:
        """Compile the Triton kernels of a step in parallel; the first dry step would compile them one after the other.

        This is done once for each sequence length and window, because other micro-batch sizes need hardly any other
        kernels.
        """
        precision, world = self.stepper.precision, self.world
        # Not done if a step depends on what a kernel that is not compiled yet would have written, such as indices of
        # experts or weights that the backward updates, or if a process that runs out of memory would leave others
        # waiting within a pass.
        if world.device.type != "cuda" or world.waits_within_passes:
            return
        if self.config.model.num_experts or self.config.optim.gradients != "device":
            return
        shape, complete = (dataset.sequence_length, self.stepper.window), False
        if shape in self._compiled:
            return
        with contextlib.suppress(torch.OutOfMemoryError), compile_ahead(world.device):
            self.dry_step(micro_rows, dataset, rows)
            if self.uses_bf16_steps:
                with precision.high_precision():
                    self.dry_step(micro_rows, dataset, rows)
            complete = True
        if world.all_reduce_min(int(complete)):
            self._compiled.add(shape)
        precision.scales.reset()
        precision.forget_weights()

    @contextlib.contextmanager
    def reserve_memory(self) -> Iterator[None]:
        """Context manager that allocates the memory that the objective will need, so that dry steps leave it free.

        Raises torch.OutOfMemoryError.
        """
        size, block = self.objective_reserved_bytes(), None
        if not size:
            yield
            return
        with contextlib.suppress(torch.OutOfMemoryError):  # all ranks must agree before any of them raises
            block = torch.empty(size, dtype=torch.uint8, device=self.world.device)
        if not self.world.all_reduce_min(int(block is not None)):
            raise torch.OutOfMemoryError(f"no room for the {size / 2**30:.2f} GiB that sampling needs")
        try:
            yield
        finally:
            del block
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def reserve_captured(self) -> Iterator[None]:
        """Context manager in which dry steps leave room for what a captured pass keeps; see `GraphedPass`.

        It is not for steps that are timed: afterwards, it empties torch's cache, where the reserved memory would stay,
        so the next step allocates anew.
        """
        if self.stepper.graphed is None:
            yield
            return
        try:
            with self.stepper.graphed.reserving():
                yield
        finally:
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()

    def objective_reserved_bytes(self) -> int:
        """Return the GPU memory that the objective will allocate and keep; 0 on a CPU."""
        if self.world.device.type == "cpu":
            return 0
        return self.stepper.objective.reserved_bytes(self.config, self.stepper.model)

    def dry_step(self, micro_rows: int, dataset: RowDataset, rows: int) -> float:
        """Run a step of `rows` rows that changes no weight; return its seconds. Raises torch.OutOfMemoryError."""
        return self.timed_dry_step(micro_rows, dataset, rows)[1]

    def timed_dry_step(self, micro_rows: int, dataset: RowDataset, rows: int) -> tuple[float, float]:
        """Run a dry step. Return the seconds until the host had launched it, and until the device had finished it."""
        passes = rows // micro_rows
        with self.stepper.fits_on_all():
            batch = self.stepper.objective.dry_batch(
                dataset,
                micro_rows,
                passes * self.world.readers,
                self.world.device,
                self.config.data.document_mask,
            )
        began = time.perf_counter()
        try:
            metrics = self.stepper.run([batch] * passes, step=1, dry=True)
            launched = time.perf_counter() - began
            metrics.read()
        except torch.OutOfMemoryError:
            self.stepper.optimizer.zero_grad()
            raise
        return launched, time.perf_counter() - began

    def first_candidate(self, stage: StageWork, rows: int) -> int:
        """Return the rows to try first: as configured, or those predicted to fit (GPU), or to fit into caches (CPU)."""
        length = stage.sequence_length
        if self.config.batch.micro_tokens != "auto":
            return self.config.batch.micro_tokens // length
        if self.world.device.type == "cpu":
            return max(1, CPU_MICRO_TOKENS // length)
        # With a sharded model or shared rows the first candidate must fit: a rank that runs out of memory would leave
        # the others waiting in a collective.
        allowed = environment_record.allowed_memory_gib(self.world.device)
        limit = allowed - self.objective_reserved_bytes() / 2**30
        limit *= 1.0 if self.world.waits_within_passes else MAX_OVERCOMMIT
        possible = [n for n in candidates(rows, rows) if self.modelled_memory(n * length) <= limit]
        return self.world.all_reduce_min(possible[0] if possible else 1)
