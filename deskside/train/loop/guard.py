"""The finite and spike guard: a bad step is skipped, counted, and after too many the run goes back or stops.

The decision to skip is made on the device (no waiting for the GPU): a step whose loss or gradient norm is not finite,
or whose norm is above a limit, leaves weights and optimizer state as they were. The limit comes from the norms of
earlier steps. It leaves out the newest one, which the host has not read yet while the next step is launched, so the
limit is the same whether or not the host had time to look: a resumed run skips exactly what the first one skipped.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deskside.config.sections import GuardConfig
from deskside.utils.errors import RunError

MINIMUM_HISTORY = 16  # norms before a spike can be told from the usual


class Diverged(RunError):
    """The guard stopped the run: going back to a checkpoint did not help any more."""


@dataclass(frozen=True)
class StepCheck:
    """What the host learned about a step."""

    skipped: bool
    reason: str | None
    too_many: bool


class Guard:
    """Keeps recent gradient norms and counts skips in a row."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self._norms: deque[tuple[int, float]] = deque(maxlen=config.window + 1)
        self._in_a_row = 0

    def limit(self, step: int) -> float:
        """The largest gradient norm that step number `step` (from 1) may have; infinite while history is short."""
        # A step without any gradient (GRPO, where nobody's answers differed) says nothing about what is usual.
        usable = [norm for at, norm in self._norms if at <= step - 2 and norm > 0][-self.config.window :]
        if len(usable) < MINIMUM_HISTORY:
            return float("inf")
        return self.config.spike_factor * statistics.median(usable)

    def skip(self, loss: Tensor, norm: Tensor, step: int) -> Tensor:
        """1.0 where the step must be skipped, else 0.0; stays on the device."""
        limit = min(self.limit(step), torch.finfo(torch.float32).max)
        # Of a loss that is not finite NaN is left, and no comparison with NaN holds. `isfinite` is four launches.
        good = loss * 0 + norm.abs() <= limit
        return 1 - good.to(torch.float32)

    def record(self, step: int, loss: float, norm: float, skipped: bool) -> StepCheck:
        """Count a step whose numbers have reached the host."""
        if not skipped:
            self._norms.append((step, norm))
            self._in_a_row = 0
            return StepCheck(False, None, False)
        self._in_a_row += 1
        finite = loss == loss and norm == norm and abs(loss) != float("inf") and norm != float("inf")
        reason = (
            f"gradient norm {norm:.3g} is above {self.limit(step):.3g}, {self.config.spike_factor:g} times the recent "
            f"median"
            if finite
            else f"loss {loss} or gradient norm {norm} is not finite"
        )
        return StepCheck(True, reason, self._in_a_row >= self.config.max_skips)

    def state(self) -> dict[str, Any]:
        return {"norms": [list(entry) for entry in self._norms], "in_a_row": self._in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._norms.clear()
        self._norms.extend((int(step), float(norm)) for step, norm in state["norms"])
        self._in_a_row = int(state["in_a_row"])
