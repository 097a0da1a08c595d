"""Find the largest micro-batch that fits in memory.

Each candidate runs a dry step on the worst-case batch. The dry step also compiles the model and gives the first
estimate of the step time. If it runs out of memory, the micro-batch is halved and gradient accumulation doubled, so the
effective batch size never changes. The result is recorded in plan.json, and a resumed run does not search again.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from deskside.config.run import RunConfig
from deskside.config.schedule import Stage
from deskside.train import environment_record
from deskside.train.loop.step import Stepper
from deskside.train.prepare.dry_step import (
    CPU_MICRO_TOKENS,
    MicroBatch,
    RowShape,
    candidates,
    find_micro_batch,
    free_failed_attempt,
    rows_per_rank,
)
from deskside.train.prepare.time_budget import DRY_SHARE, UNLIMITED, TimeBudget

TIMED_DRY_STEPS = 2
BATCHING = 4  # largest speed-up of a row from being computed in a batch
MAX_OVERCOMMIT = 1.3  # skip candidates predicted to need more than this multiple of the free memory


class StageRows(Protocol):
    """A stage and the rows of its steps. `setup.StagePlan` is one."""

    @property
    def stage(self) -> Stage: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def dataset(self) -> RowShape: ...


class BatchSizeFinder:
    """Search the micro-batch size of every stage.

    Args:
        modelled_memory: Predicted peak memory of a step in GiB, given the tokens in a micro-batch.
        log: Called with one line per attempt.
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

    def find(
        self, stages: Sequence[StageRows], recorded: Sequence[dict[str, Any]] | None = None
    ) -> tuple[list[MicroBatch], list[float]]:
        """Return the micro-batch and the measured step time (seconds) of each stage.

        `recorded` holds the result of an earlier run. It is reused if it still divides this run's rows, because a
        resumed run must compute the same sums.
        """
        self.stepper.optimizer.create_state()  # so that its memory is in use during the search
        self.stepper.optimizer.set_progress(0.0, 0.0, 0)
        self.stepper.precision.use(True)
        found, seconds = [], []
        for index, plan in enumerate(stages):
            rows = rows_per_rank(plan.tokens_per_step, plan.stage.sequence_length, self.world)
            self.stepper.set_window(plan.stage.window)
            if not recorded:
                self.check_step_time(plan, rows)
            found.append(self.find_for_stage(plan, rows, recorded[index] if recorded else None))
            if self.uses_bf16_steps and self.objective_reserved_bytes():
                # `reserve_memory` emptied torch's cache. This step fills it again, before free memory is measured.
                with self.stepper.precision.high_precision():
                    self.dry_step(found[-1].micro_rows, plan.dataset, rows)
            seconds.append(self.step_seconds(plan, rows, found[-1]))
        self.stepper.precision.reset_scales()  # the dry steps did not see the run's data
        return found, seconds

    def step_seconds(self, plan: StageRows, rows: int, found: MicroBatch) -> float:
        """Return the seconds of a step: the faster of up to two dry steps, else the estimate from the search.

        A run whose length is given in time takes only the dry steps that its budget allows. The first step on a GPU
        compiles, so at least one more is timed there.
        """
        fitted = next(
            (a["seconds"] for a in found.attempts if a["fits"] and a["micro_rows"] == found.micro_rows), 0.0
        )
        estimate = fitted * rows / min(rows, 2 * found.micro_rows)
        affordable = int(min(TIMED_DRY_STEPS, self.budget.share(DRY_SHARE) / max(1e-9, estimate)))
        fewest = 0 if self.world.device.type == "cpu" and fitted else 1
        steps = max(fewest, int(self.world.agreed([affordable])[0]))
        times = [self.dry_step(found.micro_rows, plan.dataset, rows) for _ in range(steps)]
        return min(times, default=estimate)

    def check_step_time(self, plan: StageRows, rows: int) -> None:
        """Raise UsageError early if a single step takes longer than the whole run may.

        One row is timed alone; larger batches are faster per row, but by less than `BATCHING` times. GPUs are not
        checked, because their first pass compiles.
        """
        if self.budget.limit is None or self.world.device.type != "cpu":
            return
        took = self.dry_step(1, plan.dataset, 1)
        if not self.world.agreed([float(rows * took / BATCHING > self.budget.left())])[0]:
            return
        took = min(took, self.dry_step(1, plan.dataset, 1))  # the first one allocates
        if self.world.agreed([float(rows * took / BATCHING > self.budget.left())])[0]:
            why = f"one row takes {took:.1f} s, and a step has {rows} rows"
            raise self.budget.too_short(why, rows * took / 2)

    @property
    def uses_bf16_steps(self) -> bool:
        """True if the schedule contains steps in BF16 although the recipe is another."""
        formats = self.stepper.formats
        return formats.warmup_steps > 0 or formats.bf16_from is not None

    def find_for_stage(self, plan: StageRows, rows: int, recorded: dict[str, Any] | None) -> MicroBatch:
        """Return the micro-batch of one stage with `rows` rows per step on this process."""

        def dry(micro_rows: int) -> float:
            if self.uses_bf16_steps:
                # BF16 steps keep more bytes for the backward pass than FP8 steps, and have to fit as well.
                with self.stepper.precision.high_precision():
                    self.dry_step(micro_rows, plan.dataset, min(rows, 2 * micro_rows))
            return self.dry_step(micro_rows, plan.dataset, min(rows, 2 * micro_rows))

        # With another number of processes than before, the rows divide differently.
        if recorded and recorded["micro_rows"] * recorded["accumulation"] == rows:
            found = MicroBatch(**{**recorded, "attempts": tuple(recorded["attempts"])})
            dry(found.micro_rows)
            return found

        def dry_with_reserve(micro_rows: int) -> float:
            with self.reserve_memory():
                return dry(micro_rows)

        first, device = self.first_candidate(plan, rows), self.world.device
        return find_micro_batch(dry_with_reserve, rows, first, self.log, lambda: free_failed_attempt(device))

    @contextlib.contextmanager
    def reserve_memory(self) -> Iterator[None]:
        """Context manager that reserves the memory which the objective needs beside training.

        Raises torch.OutOfMemoryError.
        """
        wanted, block = self.objective_reserved_bytes(), None
        if not wanted:
            yield
            return
        with contextlib.suppress(torch.OutOfMemoryError):  # all ranks must agree before any of them raises
            block = torch.empty(wanted, dtype=torch.uint8, device=self.world.device)
        if not self.world.smallest(int(block is not None)):
            raise torch.OutOfMemoryError(f"no room for the {wanted / 2**30:.2f} GiB kept beside training")
        try:
            yield
        finally:
            del block
            torch.cuda.empty_cache()

    def objective_reserved_bytes(self) -> int:
        if self.world.device.type == "cpu":
            return 0
        return self.stepper.objective.keeps_bytes(self.config, self.stepper.model)

    def dry_step(self, micro_rows: int, dataset: RowShape, rows: int) -> float:
        """Run a step of `rows` rows that changes no weight; return its seconds. Raises torch.OutOfMemoryError."""
        passes = rows // micro_rows
        masked, device = self.config.data.document_mask, self.world.device
        everywhere = passes * self.world.size
        batch = self.stepper.objective.dry_batch(dataset, micro_rows, everywhere, device, masked)
        began = time.perf_counter()
        try:
            self.stepper.run([batch] * passes, step=1, dry=True).read()
        except torch.OutOfMemoryError:
            self.stepper.optimizer.zero_grad()
            raise
        return time.perf_counter() - began

    def first_candidate(self, plan: StageRows, rows: int) -> int:
        """Return the rows to try first: as configured, else predicted to fit (GPU), else cache-sized (CPU)."""
        length = plan.stage.sequence_length
        if self.config.batch.micro_tokens != "auto":
            return self.config.batch.micro_tokens // length
        if self.world.device.type == "cpu":
            return max(1, CPU_MICRO_TOKENS // length)
        # Sharded ranks cannot search: one that runs out of memory leaves the others waiting in a collective.
        free = environment_record.free_memory_gib(self.world.device) - self.objective_reserved_bytes() / 2**30
        limit = free * (1.0 if self.world.sharded else MAX_OVERCOMMIT)
        possible = [n for n in candidates(rows, rows) if self.modelled_memory(n * length) <= limit]
        return self.world.smallest(possible[0] if possible else 1)
