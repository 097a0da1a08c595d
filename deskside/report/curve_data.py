"""Data of loss curves: each arm's mean over seeds, with a band from the lowest to the highest seed.

The report (matplotlib, `curves.py`) and the dashboard (plotly, `dashboard/study_charts.py`) draw the same lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deskside.run.record import number
from deskside.study.results import Arm

Curve = list[tuple[float, float]]
CURVE_TITLES = {
    "loss": "training loss, nats per token",
    "val_bpb": "validation loss, bits per byte",
    "tokens": "training tokens",
    "seconds": "training time",
}
MIN_POINTS = 3  # a curve of validation losses with fewer points is replaced by that of the training loss
EARLY_FRACTION = 0.35  # the y axis ends at the highest mean loss from this fraction of the x axis on


@dataclass(frozen=True)
class SeedBand:
    """The curves of an arm's seeds: their mean, lowest and highest value at each `x` that all of them cover."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def curve(rows: Sequence[Mapping[str, Any]], x_key: str, y_key: str) -> Curve:
    """Return the (x, y) points of a trial's curve, sorted, without rows that lack one of the two keys."""
    points = [(number(row.get(x_key)), number(row.get(y_key))) for row in rows]
    return sorted((x, y) for x, y in points if x is not None and y is not None)


def running_median(values: list[float]) -> list[float] | None:
    """Return the running median over a fortieth of the run (at least 5 points), or None for fewer than 20 points."""
    if len(values) < 20:
        return None
    half = max(2, len(values) // 80)
    return [float(np.median(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def loss_curve(rows: Sequence[Mapping[str, Any]], y_key: str, x_key: str) -> Curve:
    """Return the curve of a trial. The training loss is noisy, so its running median is returned."""
    points = curve(rows, x_key, y_key)
    smooth = running_median([y for _, y in points]) if y_key == "loss" else None
    return [(x, y) for (x, _), y in zip(points, smooth, strict=True)] if smooth else points


def finished_curves(arm: Arm, y_key: str, x_key: str) -> list[Curve]:
    """Return the curves of the finished trials."""
    curves = [loss_curve(trial.curve, y_key, x_key) for trial in arm.finished()]
    return [points for points in curves if points]


def loss_key(arms: Sequence[Arm], x_key: str) -> str:
    """Return "val_bpb" if every curve of validation losses has at least `MIN_POINTS` points, else "loss"."""
    lengths = [len(points) for arm in arms for points in finished_curves(arm, "val_bpb", x_key)]
    return "val_bpb" if lengths and min(lengths) >= MIN_POINTS else "loss"


def seed_band(curves: Sequence[Curve]) -> SeedBand:
    """Return the band of an arm's curves (at least one), over the range of x that all of them cover."""
    start = max(points[0][0] for points in curves)
    stop = min(points[-1][0] for points in curves)
    grid = np.array(sorted({x for points in curves for x, _ in points if start <= x <= stop}) or [stop])
    values = np.array([np.interp(grid, *np.array(points).T) for points in curves])
    return SeedBand(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(curves))


def y_range(bands: Sequence[SeedBand]) -> tuple[float, float] | None:
    """Return the (start, stop) of a y axis that leaves out the high losses of the first steps; None if none are.

    Without it, the first steps would squeeze the differences between the arms.
    """
    x_max = max(float(band.x[-1]) for band in bands)
    bottom = min(float(band.low.min()) for band in bands)
    early = EARLY_FRACTION * x_max
    later = [mean for band in bands for x, mean in zip(band.x, band.mean, strict=True) if x >= early]
    top = float(max([*later, *(np.interp(early, band.x, band.mean) for band in bands)]))
    if not max(float(band.high.max()) for band in bands) > top > bottom:
        return None
    return bottom - 0.06 * (top - bottom), top + 0.04 * (top - bottom)
