"""Settling the micro-batch of every stage by dry steps, which also compile everything and time a step."""

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
    Fit,
    RowShape,
    candidates,
    fit,
    forget,
    rows_per_rank,
)
from deskside.train.prepare.time_budget import DRY_SHARE, UNLIMITED, TimeBudget

TIMED_DRY_STEPS = 2
BATCHING = 4  # how much faster a row becomes among others, at most
HOPELESS = 1.3  # candidates modelled to need this many times the memory that is free are not tried


class StageRows(Protocol):
    """A stage and the rows of its steps; `setup.StagePlan` is one."""

    @property
    def stage(self) -> Stage: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def dataset(self) -> RowShape: ...


class BatchSizeFinder:
    """`modelled_memory(micro_tokens)` is the modelled peak of a step in GiB."""

    def __init__(
        self,
        config: RunConfig,
        stepper: Stepper,
        modelled_memory: Callable[[int], float],
        say: Callable[[str], None],
        budget: TimeBudget = UNLIMITED,
    ):
        self.config, self.stepper, self.modelled_memory, self.say = config, stepper, modelled_memory, say
        self.budget = budget
        self.world = stepper.world

    def find(
        self, plans: Sequence[StageRows], recorded: Sequence[dict[str, Any]] | None
    ) -> tuple[list[Fit], list[float]]:
        """The micro-batch of every stage, as recorded or found, and the seconds of a step with it."""
        self.stepper.optimizer.create_state()  # it must be there when it is found what fits beside it
        self.stepper.optimizer.set_progress(0.0, 0.0, 0)
        self.stepper.precision.use(True)
        fits, seconds = [], []
        for index, plan in enumerate(plans):
            rows = rows_per_rank(plan.tokens_per_step, plan.stage.sequence_length, self.world)
            self.stepper.set_window(plan.stage.window)
            if not recorded:
                self.refuse_hopeless(plan, rows)
            fits.append(self.fit(plan, rows, recorded[index] if recorded else None))
            if self.also_plain and self.kept_bytes():
                # `held` emptied torch's cache, and who shares out what is left will look at what it has.
                with self.stepper.precision.high_precision():
                    self.dry_step(fits[-1].micro_rows, plan.dataset, rows)
            seconds.append(self.step_seconds(plan, rows, fits[-1]))
        self.stepper.precision.forget()  # what the scales have seen were not the run's data
        return fits, seconds

    def step_seconds(self, plan: StageRows, rows: int, found: Fit) -> float:
        """Return the seconds of a whole step: the faster of two dry steps, or of one, or the estimate from fitting.

        A run of limited length takes the dry steps that it has time for. A GPU's first step compiles, so at least
        one more is timed there.
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

    def refuse_hopeless(self, plan: StageRows, rows: int) -> None:
        """Raise UsageError within seconds where a single step takes longer than the run has.

        One row is timed alone. More rows at once are faster, by less than `BATCHING` times. A GPU is not asked: its
        first pass compiles.
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
    def also_plain(self) -> bool:
        """Whether some steps are in BF16 though the recipe is another."""
        formats = self.stepper.formats
        return formats.warmup_steps > 0 or formats.bf16_from is not None

    def fit(self, plan: StageRows, rows: int, recorded: dict[str, Any] | None) -> Fit:
        """The micro-batch of one stage of `rows` rows per step on this process."""

        def dry(micro_rows: int) -> float:
            if self.also_plain:
                # BF16 keeps more bytes for the backward than FP8, and has to fit too when its turn comes.
                with self.stepper.precision.high_precision():
                    self.dry_step(micro_rows, plan.dataset, min(rows, 2 * micro_rows))
            return self.dry_step(micro_rows, plan.dataset, min(rows, 2 * micro_rows))

        # Another number of processes than before needs another division.
        if recorded and recorded["micro_rows"] * recorded["accumulation"] == rows:
            found = Fit(**{**recorded, "attempts": tuple(recorded["attempts"])})
            dry(found.micro_rows)
            return found

        def beside(micro_rows: int) -> float:
            with self.held():
                return dry(micro_rows)

        return fit(beside, rows, self.largest(plan, rows), self.say, lambda: forget(self.world.device))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Room that the objective will want beside the steps is taken. Raises torch.OutOfMemoryError."""
        wanted, block = self.kept_bytes(), None
        if not wanted:
            yield
            return
        with contextlib.suppress(torch.OutOfMemoryError):  # the other processes must hear of it first
            block = torch.empty(wanted, dtype=torch.uint8, device=self.world.device)
        if not self.world.smallest(int(block is not None)):
            raise torch.OutOfMemoryError(f"no room for the {wanted / 2**30:.2f} GiB kept beside training")
        try:
            yield
        finally:
            del block
            torch.cuda.empty_cache()

    def kept_bytes(self) -> int:
        if self.world.device.type == "cpu":
            return 0
        return self.stepper.objective.keeps_bytes(self.config, self.stepper.model)

    def dry_step(self, micro_rows: int, dataset: RowShape, rows: int) -> float:
        """Seconds of a step of `rows` rows, which changes nothing. Raises torch.OutOfMemoryError."""
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

    def largest(self, plan: StageRows, rows: int) -> int:
        """Where fitting starts: what was asked for, what is modelled to fit on a GPU, a cache-sized batch on a CPU."""
        length = plan.stage.sequence_length
        if self.config.batch.micro_tokens != "auto":
            return self.config.batch.micro_tokens // length
        if self.world.device.type == "cpu":
            return max(1, CPU_MICRO_TOKENS // length)
        # Sharded processes cannot search, because one that is out of memory leaves the others waiting.
        free = environment_record.free_memory_gib(self.world.device) - self.kept_bytes() / 2**30
        limit = free * (1.0 if self.world.sharded else HOPELESS)
        possible = [n for n in candidates(rows, rows) if self.modelled_memory(n * length) <= limit]
        return self.world.smallest(possible[0] if possible else 1)
