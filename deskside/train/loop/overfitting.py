"""Early warning of overfitting: the validation loss rises while the training loss falls.

The rule is a trend test without assumptions about the size or distribution of the noise (Mann 1945; Kendall 1938). Of
the last `WINDOW` evaluations, it counts the pairs whose later loss is lower. If the validation loss only fluctuated,
every order of the 7 losses would be equally likely, and at most `MAX_FALLING_PAIRS` = 1 such pair would occur in 1 + 6
of 7! = 5,040 orders: a false alarm in 0.14 % of the evaluations after the sixth, or in fewer if the loss still falls.
The training loss, a mean over the steps between evaluations, must have fallen too: if both rise, the run is unstable
instead. The price is that at least 6 evaluations pass between the lowest loss and the warning.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from deskside.data.reading.rows import PackedDataset
from deskside.run.directory import RunDirectory
from deskside.train.loop.callbacks import Watch
from deskside.train.objective import RowDataset
from deskside.utils.signals import StopSignal

WINDOW = 7
MAX_FALLING_PAIRS = 1


def validation_loss(row: Mapping[str, Any]) -> float | None:
    """Return the validation loss in a row of metrics.jsonl: bits per byte, or the loss of fine-tuning; None without."""
    value = row.get("val_bpb", row.get("val_loss"))
    return None if value is None else float(value)


def overfits(validation: Sequence[float], training: Sequence[float]) -> bool:
    """Return True if the last `WINDOW` validation losses rise while the training losses fall, both in order of time."""
    last = list(validation)[-WINDOW:]
    if len(last) < WINDOW or not training[-1] < training[-WINDOW]:
        return False
    return sum(later <= earlier for earlier, later in itertools.combinations(last, 2)) <= MAX_FALLING_PAIRS


class OverfittingWatch(Watch):
    """Training callback that warns once when a run overfits, and remembers it in `detected`."""

    def __init__(self) -> None:
        self.detected = False
        self._epoch_tokens = math.inf
        self._forget()

    def _forget(self) -> None:
        self._step = 0  # of the last row
        self._validation: deque[float] = deque(maxlen=WINDOW)
        self._training: deque[float] = deque(maxlen=WINDOW)
        self._sum, self._steps = 0.0, 0  # of the training losses since the last evaluation
        self._best = (math.inf, 0)  # lowest validation loss, and its step

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        super().begin(run, stop, validation)
        if isinstance(validation, PackedDataset):
            self._epoch_tokens = validation.index.splits["train"].tokens
        self._read_metrics()

    def _read_metrics(self) -> None:
        self._forget()
        for row in self.run.read_metrics():
            self._add(row)

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        was_detected = self.detected
        if row["step"] > self._step:
            self._add(row)
        else:  # after a rollback, which deletes the rows of the steps that it undoes
            self._read_metrics()
        if self.detected and not was_detected:
            best, step = self._best
            epochs = row["tokens"] / self._epoch_tokens
            read = f" after {epochs:.1f} epochs" if epochs else ""  # of packed data
            self.warn(
                f"overfitting{read}: the validation loss has risen to {self._validation[-1]:.4f} from "
                f"{best:.4f} at step {step}, while the training loss falls; use fewer epochs, a smaller model or more "
                f"text, or keep the best checkpoint with --checkpoint.keep_best true"
            )

    def _add(self, row: Mapping[str, Any]) -> bool:
        """Add a row of metrics. Return True if it shows overfitting for the first time."""
        self._step = row["step"]
        if not row.get("skipped") and row.get("loss") is not None:
            self._sum, self._steps = self._sum + row["loss"], self._steps + 1
        value = validation_loss(row)
        if value is None or not math.isfinite(value) or not self._steps:  # metrics.jsonl has null for NaN
            return False
        self._best = min(self._best, (value, row["step"]))
        self._validation.append(value)
        self._training.append(self._sum / self._steps)
        self._sum, self._steps = 0.0, 0
        if self.detected or not overfits(self._validation, self._training):
            return False
        self.detected = True
        return True
