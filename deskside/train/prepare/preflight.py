"""Checks before torch is imported, and the time that a run of limited length may spend before its first step.

Set-up (reading data, dry steps, the reference of DPO, the first answers of GRPO, the first measurement) counts against
`--hours`. Each part measures a small slice, and does only what fits its share; a run whose first step cannot fit is
refused at once with a length that would do.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError

DRY_SHARE = 0.05  # of the length, for the second and third dry step together
MEASURE_SHARE = 0.05  # for one measurement on the held-out split
SAMPLE_SHARE = 0.02  # for one round of sample answers
REPORT_SECONDS, REPORT_SHARE = 4.0, 0.05  # for the report, at most; 3 s were measured on two CPU cores
WANTED_STEPS = 20  # of a length that is recommended
MARGIN = 1.2  # by which a recommended length exceeds the estimate
PREPARE = "deskside data prepare SOURCE --out data/NAME"


def check_start(config: RunConfig) -> None:
    """Raise UsageError for a run without a length or without data."""
    if config.schedule.length is None:
        raise UsageError(
            "schedule.length: the run has no length; give --hours 2, --schedule.steps 2000 or --schedule.tokens 1e9"
        )
    path = config.data.path
    if path is None:
        raise UsageError(
            f"data.path: no data was given; make some with: {PREPARE}; then add --data.path data/NAME"
        )
    if not config.data.sources and not (Path(path) / "index.json").exists():
        raise UsageError(f"data.path: {path} is not prepared data (no index.json); make some with: {PREPARE}")


def set_cublas_workspace(config: RunConfig) -> None:
    """Give cuBLAS the fixed workspace that deterministic runs need. CUDA reads it once, when torch starts it."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class TimeBudget:
    """A limit in wall-clock seconds; None is without a limit. `spent` returns the seconds since the process started."""

    limit: float | None = None
    spent: Callable[[], float] = lambda: 0.0

    def share(self, part: float) -> float:
        """Return that part of the limit in seconds; infinity without a limit."""
        return math.inf if self.limit is None else part * self.limit

    def left(self) -> float:
        """Return the seconds left; infinity without a limit."""
        return math.inf if self.limit is None else self.limit - self.spent()

    def too_short(self, why: str, step_seconds: float, setup_seconds: float = 0.0) -> UsageError:
        """Return the error for a run that has no time for a step, with a number of hours that would do.

        setup_seconds: still to come before the first step.
        """
        assert self.limit is not None
        shares = 2 * MEASURE_SHARE + 2 * SAMPLE_SHARE + DRY_SHARE
        needed = (self.spent() + setup_seconds + WANTED_STEPS * step_seconds) * MARGIN / (1 - shares)
        return too_short(self.limit, why, needed)


UNLIMITED = TimeBudget()


def too_short(limit: float, why: str, needed: float) -> UsageError:
    """Return the error for a length of `limit` seconds where `needed` seconds would do."""
    hours = max(needed, limit) / 3600
    digits = max(0, 1 - math.floor(math.log10(hours)))  # two significant digits, rounded up
    hours = math.ceil(hours * 10**digits) / 10**digits
    return UsageError(
        f"schedule.length: {limit:g} s is too short: {why}; --hours {hours:g} would do, or fewer tokens in a step "
        "(--batch.tokens)"
    )
