"""Warning that the loss of a new model rises: its updates are too large, and it may stay worse to its end.

A new model begins near equal probabilities, with a loss of log(vocab_size). Nothing that it learns should make it worse
than that. Of 279 measured runs from random weights, the loss of 24 rose by more than a tenth, half of them with AdamW
(docs/log.md, 2026-11-30).
"""

import math
from typing import Any

from deskside.config.model import ModelConfig
from deskside.run.directory import RunDirectory
from deskside.train.loop.callbacks import Callback, RunLog
from deskside.train.objective import RowDataset
from deskside.utils.signals import StopSignal

NEW_MODEL = 0.9  # a model whose first loss is at least this share of log(vocab_size) is new
RISE = 1.1  # times the first loss


class LossRiseWatch(Callback):
    """Training callback that warns once when the loss of a new model rises far above its first loss."""

    def __init__(self, config: ModelConfig):
        self._new_model = NEW_MODEL * math.log(config.vocab_size)
        self._limit = math.inf

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        self._run = run

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        loss = row.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        if row["step"] == 1 and loss >= self._new_model:
            self._limit = RISE * loss
        if loss <= self._limit:
            return
        RunLog(self._run).say(
            f"warning: the loss of step {row['step']} is {loss:.2f}, above that of an untrained model "
            f"({self._limit / RISE:.2f}): the updates are too large, and the loss may stay too high for the "
            "whole run; start again with a longer --schedule.warmup or a lower --optim.lr"
        )
        self._limit = math.inf
