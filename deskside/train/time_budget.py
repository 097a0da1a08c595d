"""The time limit of a run, and the share of it that each part of the set-up may take.

The set-up counts towards `--hours`: reading data, dry steps, the reference of DPO, the first answers of GRPO, the first
evaluation. Each part times a small slice, and does no more than fits into its share of the limit. If there is no time
for a single step, the run is refused at once, and a longer length is recommended.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from deskside.utils.errors import UsageError

# Shares of the run's length
DRY_SHARE = 0.05  # for the timed dry steps after the batch size search
EVALUATE_SHARE = 0.05  # for one evaluation on the held-out split
SAMPLE_SHARE = 0.02  # for generating samples once
REPORT_SECONDS, REPORT_SHARE = 4.0, 0.05  # for the report, the smaller one; it took 3 s on two CPU cores

RECOMMENDED_STEPS = 20  # optimizer steps in a recommended length
MARGIN = 1.2  # factor by which a recommended length exceeds the estimate


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

    def too_short(self, why: str, step_seconds: float, setup_seconds: float = 0.0) -> "TooShortError":
        """Return the error for a run without time for a step.

        setup_seconds: what the set-up will still take.
        """
        assert self.limit is not None
        shares = 2 * EVALUATE_SHARE + 2 * SAMPLE_SHARE + DRY_SHARE
        needed = (self.spent() + setup_seconds + RECOMMENDED_STEPS * step_seconds) * MARGIN / (1 - shares)
        return TooShortError(self.limit, why, needed)


UNLIMITED = TimeBudget()


class TooShortError(UsageError):
    """A length of `limit` seconds leaves no time for a step. The message recommends at least `needed` seconds."""

    def __init__(self, limit: float, why: str, needed: float):
        hours = max(needed, limit) / 3600
        digits = max(0, 1 - math.floor(math.log10(hours)))  # at least two significant digits, rounded up
        hours = math.ceil(hours * 10**digits) / 10**digits
        super().__init__(
            f"schedule.length: {limit:g} s is too short: {why}; give --hours {hours:g}, or fewer tokens per step "
            "(--batch.tokens)"
        )
        self.why = why
