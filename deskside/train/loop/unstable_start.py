"""Warning that a run begins with too large updates, after which its loss may stay too high to its end.

There are two signs:

- A spike of the gradient norm during the warm-up, whose step `guard.py` skips.
- A loss above that of an untrained model. A new model begins near equal probabilities, with a loss of log(vocab_size),
  and nothing that it learns should make it worse than that. Of 279 measured runs from random weights, the loss of 24
  rose by more than a tenth, half of them with AdamW (docs/log.md, 2026-11-30).
"""

import math
from typing import Any

from deskside.config.run import RunConfig
from deskside.optim.lr_schedule import warmup_share
from deskside.train.loop.callbacks import Watch

NEW_MODEL = 0.9  # a model whose first loss is at least this share of log(vocab_size) is new
RISE = 1.1  # times the first loss


class UnstableStartWatch(Watch):
    """Training callback that warns once when the updates of a run's first steps are too large."""

    def __init__(self, config: RunConfig):
        self._schedule = config.schedule
        self._new_model = NEW_MODEL * math.log(config.model.vocab_size)
        self._limit = math.inf
        self._warned = False

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        loss = row.get("loss")
        if row["step"] == 1 and loss is not None and loss >= self._new_model:
            self._limit = RISE * loss
        if self._warned:
            return
        sign = self._spike(row, total_steps) if row.get("skipped") else self._rise(row["step"], loss)
        if sign is not None:
            self._warned = True
            self.warn(
                f"{sign}: the updates are too large, and the loss may stay too high for the whole run; if it does, "
                "start again with a longer --schedule.warmup or a lower --optim.lr"
            )

    def _spike(self, row: dict[str, Any], total_steps: int) -> str | None:
        """Say that a skipped step was a spike during the warm-up; None if it was not, or has no finite norm."""
        if row["grad_norm"] is None or not math.isfinite(row["grad_norm"]):
            return None
        warmup = warmup_share(self._schedule, total_steps) * total_steps
        if row["step"] - 1 >= warmup:
            return None
        return (
            f"the gradient norm of step {row['step']} is a spike, during the warm-up of {round(warmup)} steps"
        )

    def _rise(self, step: int, loss: float | None) -> str | None:
        """Say that a loss is far above the first one; None if it is not."""
        if loss is None or not math.isfinite(loss) or loss <= self._limit:
            return None
        return f"the loss of step {step} is {loss:.2f}, above that of an untrained model ({self._limit / RISE:.2f})"
