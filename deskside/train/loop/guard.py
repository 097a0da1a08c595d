"""Skip steps with a non-finite loss or a gradient-norm spike; roll back after too many in a row.

The decision is made on the device, without a host synchronization: a step whose loss or gradient norm is not finite, or
whose norm exceeds a limit, leaves weights and optimizer state unchanged. The limit is a multiple of the 90th percentile
of the norms of recent steps, skipped ones included. It leaves out the previous step, because the host launches a step
before it has read the metrics of the one before. The limit therefore does not depend on host timing, and a resumed run
skips exactly the same steps.

The median would be too strict: once DPO has learned most pairs, the median norm falls by orders of magnitude, while a
batch with a pair that is still wrong has a norm as large as before. Such batches are not outliers; if they were
skipped, the model would stop learning, and then the run would stop. In pretraining, norms vary little, and the median
and the 90th percentile are nearly equal.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deskside.config.sections import MIN_NORMS, GuardConfig
from deskside.utils.errors import RunError

PERCENTILE = 0.9


class Diverged(RunError):
    """The run was stopped because it diverged again after the maximum number of rollbacks."""


class Guard:
    """History of recent gradient norms, and the number of consecutive skipped steps."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self._norms: deque[tuple[int, float]] = deque(maxlen=config.window + 1)
        self._in_a_row = 0

    def limit(self, step: int) -> float:
        """Return the largest gradient norm allowed in step `step` (from 1): infinite while the history is short."""
        usable = [norm for earlier, norm in self._norms if earlier <= step - 2][-self.config.window :]
        if len(usable) < MIN_NORMS:
            return float("inf")
        return self.config.spike_factor * sorted(usable)[int(PERCENTILE * (len(usable) - 1))]

    def finite_limit(self, step: int) -> float:
        """Return `limit`, or the largest float32 while that is infinite, so that an infinite norm exceeds it."""
        return min(self.limit(step), torch.finfo(torch.float32).max)

    def skip(self, loss: Tensor, norm: Tensor, step: int) -> Tensor:
        """Return 1.0 if the step must be skipped, else 0.0, as a tensor on the device."""
        # False if the loss is not finite, since NaN or inf times 0 is NaN. isfinite() would launch four kernels.
        good = loss * 0 + norm.abs() <= self.finite_limit(step)
        return 1 - good.to(torch.float32)

    @property
    def too_many_skips(self) -> bool:
        """True if so many steps in a row were skipped that the run must roll back."""
        return self._in_a_row >= self.config.max_skips

    def record(self, step: int, loss: float, norm: float, skipped: bool) -> str | None:
        """Record a finished step. Return the reason why it was skipped, or None if it was not."""
        reason = self._reason(step, loss, norm) if skipped else None
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        # GRPO steps in which all answers earned the same reward have zero gradient. They would bias the limit, and in a
        # short window they would leave too few other norms.
        if math.isfinite(norm) and norm > 0:
            self._norms.append((step, norm))
        return reason

    def count_from_zero(self) -> None:
        """Count consecutive skipped steps from zero: the run went back, perhaps to a checkpoint between them."""
        self._in_a_row = 0

    def _reason(self, step: int, loss: float, norm: float) -> str:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss} or gradient norm {norm} is not finite"
        limit, factor = self.limit(step), self.config.spike_factor
        return f"gradient norm {norm:.3g} is above {limit:.3g}, {factor:g} times the 90th percentile of recent norms"

    def state(self) -> dict[str, Any]:
        return {"norms": [list(entry) for entry in self._norms], "in_a_row": self._in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._norms.clear()
        # Checkpoints of earlier versions contain the zeros that `record` leaves out.
        self._norms.extend((int(step), float(norm)) for step, norm in state["norms"] if norm > 0)
        self._in_a_row = int(state["in_a_row"])
