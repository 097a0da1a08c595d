"""Checks before torch is imported, and the time budget for setting up a run with a time limit.

The set-up counts towards `--hours`: reading data, dry steps, the reference of DPO, the first answers of GRPO, the first
evaluation. Each part times a small slice, and does no more than fits into its share of the limit. If there is no time
for a single step, the run is refused at once, and a longer length is recommended.
"""

import math
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deskside.config.run import RunConfig
from deskside.data.reading.index_file import INDEX, is_prepared
from deskside.utils.errors import UsageError

# Shares of the run's length
DRY_SHARE = 0.05  # for the timed dry steps after the batch size search
EVALUATE_SHARE = 0.05  # for one evaluation on the held-out split
SAMPLE_SHARE = 0.02  # for generating samples once
REPORT_SECONDS, REPORT_SHARE = 4.0, 0.05  # for the report: the smaller one; it took 3 s on two CPU cores

RECOMMENDED_STEPS = 20  # optimizer steps in a recommended length
MARGIN = 1.2  # factor by which a recommended length exceeds the estimate
PREPARE_COMMAND = "deskside data prepare SOURCE --out data/NAME"


def check_start(config: RunConfig) -> None:
    """Raise UsageError for a run without a length or without data, or whose vocabulary is too small for its data."""
    if config.schedule.length is None:
        raise UsageError(
            "schedule.length: the run has no length; give --hours 2, --schedule.steps 2000 or --schedule.tokens 1e9"
        )
    check_path(config)
    path = Path(str(config.data.path))
    if config.align is None and is_prepared(path):
        from deskside.data.reading.index import read_index  # imports numpy, which takes time

        check_vocabulary(config, read_index(path).tokenizer.vocab_size)


def check_path(config: RunConfig) -> None:
    """Raise UsageError unless the run has prepared data, or sources to prepare it from."""
    path = config.data.path
    if path is None:
        raise UsageError(
            f"data.path: no data was given; prepare some with: {PREPARE_COMMAND}; then add --data.path data/NAME"
        )
    if not config.data.sources and not is_prepared(path):
        command = (
            PREPARE_COMMAND.replace("SOURCE", shlex.quote(path)) if Path(path).is_dir() else PREPARE_COMMAND
        )
        raise UsageError(f"data.path: {path} is not prepared data (no {INDEX}); prepare some with: {command}")


def check_vocabulary(config: RunConfig, tokens: int) -> None:
    """Raise UsageError if the model's vocabulary is smaller than that of the data, which has `tokens` tokens."""
    if tokens > config.model.vocab_size:
        raise UsageError(
            f"model.vocab_size: {config.data.path} has a vocabulary of {tokens}, the model only one of "
            f"{config.model.vocab_size}; use --model.vocab_size {tokens}, or prepare the data again with deskside data "
            f"prepare ... --vocab-size {config.model.vocab_size}"
        )


def set_cublas_workspace(config: RunConfig) -> None:
    """Give cuBLAS the fixed workspace that deterministic runs need. Call it before CUDA is initialized."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class TimeBudget:
    """The time limit of a run in seconds (None: no limit). `spent` returns the seconds since the run started."""

    limit: float | None = None
    spent: Callable[[], float] = lambda: 0.0

    def share(self, fraction: float) -> float:
        """Return a fraction of the limit in seconds; infinity without a limit."""
        return math.inf if self.limit is None else fraction * self.limit

    def left(self) -> float:
        """Return the seconds left; infinity without a limit."""
        return math.inf if self.limit is None else self.limit - self.spent()

    def too_short(self, why: str, step_seconds: float, setup_seconds: float = 0.0) -> UsageError:
        """Return the error for a run without time for a step, which recommends a length.

        setup_seconds: what the set-up will still take.
        """
        assert self.limit is not None
        shares = 2 * EVALUATE_SHARE + 2 * SAMPLE_SHARE + DRY_SHARE
        needed = (self.spent() + setup_seconds + RECOMMENDED_STEPS * step_seconds) * MARGIN / (1 - shares)
        return too_short(self.limit, why, needed)


UNLIMITED = TimeBudget()


def too_short(limit: float, why: str, needed: float) -> UsageError:
    """Return the error for a length of `limit` seconds, which recommends at least `needed` seconds."""
    hours = max(needed, limit) / 3600
    digits = max(0, 1 - math.floor(math.log10(hours)))  # at least two significant digits, rounded up
    hours = math.ceil(hours * 10**digits) / 10**digits
    return UsageError(
        f"schedule.length: {limit:g} s is too short: {why}; give --hours {hours:g}, or fewer tokens per step "
        "(--batch.tokens)"
    )
