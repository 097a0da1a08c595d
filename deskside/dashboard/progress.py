"""How far a run is, from its newest rows: what the Live tab shows."""

import itertools
import time
from dataclasses import dataclass
from statistics import median

from deskside.dashboard.reading import Brief, Rows
from deskside.run.record import number

WINDOW = 20  # steps that the speed of the moment is taken from


@dataclass(frozen=True)
class Progress:
    """None: not known. seconds_left: modelled, the steps that remain at the pace of the last ones."""

    step: int | None
    total: int | None
    seconds_left: float | None
    silent_seconds: float | None
    values: dict[str, float]

    @property
    def share(self) -> float | None:
        """Part of the steps that are done, 0 to 1."""
        if self.step is None or not self.total:
            return None
        return min(1.0, self.step / self.total)


def progress(brief: Brief, rows: Rows, now: float | None = None) -> Progress:
    """How far a run is. `values`: the newest number of each metric of metrics.jsonl."""
    now = time.time() if now is None else now
    values: dict[str, float] = {}
    for row in rows.steps[-WINDOW:]:
        values |= {key: value for key in row if (value := number(row[key])) is not None}
    if rows.steps:
        for row in rows.steps:  # measured now and then, so the newest may lie before the window
            values |= {k: v for k in row if k.startswith("val_") and (v := number(row[k])) is not None}
    step = int(values["step"]) if "step" in values else None
    total = brief.total_steps
    pace = _pace(rows)
    left = None if step is None or total is None or pace is None else max(0, total - step) * pace
    silent = now - rows.written if rows.written else None
    return Progress(step, total, left, silent, values)


def _pace(rows: Rows) -> float | None:
    """Seconds per step of the last steps: the median, so that an evaluation between two of them does not count."""
    points = [(number(row.get("step")), number(row.get("seconds"))) for row in rows.steps[-WINDOW - 1 :]]
    known = [(step, seconds) for step, seconds in points if step is not None and seconds is not None]
    paces = [
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(known) if b[0] > a[0] and b[1] > a[1]
    ]
    return median(paces) if paces else None
