"""Heat maps of tokens per second and peak memory over model size and sequence length.

Every cell shows its value as text, and cells of points that ran out of memory are hatched, so that no information is in
the colour alone. The colour map is cividis, made for readers with and without colour blindness (Nunez, Anderton and
Renslow 2018).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deskside.budget.shape import num_params
from deskside.measurements.store import Row
from deskside.probe.grid import Point, option_words
from deskside.utils.errors import RunError
from deskside.utils.format import GIB, count, gib_digits

CELL = (0.95, 0.5)  # width and height in inches
DPI = 160
STATUS_TEXT = {
    "oom": "out of\nmemory",
    "skipped": "needs more\nmemory",
    "failed": "failed",
    "timeout": "too slow",
}
HATCHED = ("oom", "skipped")

Cells = dict[tuple[str, int], tuple[Point, Row]]


@dataclass(frozen=True)
class _Panel:
    """A quantity to draw: its title, value in a row, text format, and whether its colour scale is logarithmic."""

    title: str
    value: Callable[[Row], float]
    format: Callable[[float], str]
    logarithmic: bool


PANELS = (
    _Panel("tokens per second", lambda row: float(row["result"]["tokens_per_second"]), count, True),
    _Panel(
        "peak memory, GiB",
        lambda row: float(row["result"]["peak_allocated_bytes"]) / GIB,
        lambda number: gib_digits(number * GIB),
        False,
    ),
)


def draw(rows: Sequence[tuple[Point, Row]], card: str, path: Path) -> None:
    """Write the heat maps of these rows as a PNG. Raises RunError if it cannot be written.

    If no two points have the same cell, they share one pair of panels, and cells name their options where these differ.
    Otherwise every combination of options has its own pair.
    """
    smallest_first = sorted(rows, key=lambda row: num_params(row[0].model))
    shapes = list(dict.fromkeys(_label(point) for point, _ in smallest_first))
    lengths = sorted({point.sequence_length for point, _ in rows})
    groups = _groups(rows)
    size = (
        2 * (CELL[0] * max(len(lengths), 3) + 1.9),
        len(groups) * (CELL[1] * len(shapes) + 1.1) + 0.5,
    )
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), 2, squeeze=False)
    for column, panel in enumerate(PANELS):
        values = [panel.value(row) for _, row in rows if row["status"] == "ok"]
        norm = _norm(values, panel.logarithmic)  # shared by all options, so that they can be compared
        for axes_row, (title, cells) in zip(axes, groups, strict=True):
            _draw_panel(axes_row[column], panel, norm, cells, shapes, lengths, title)
    figure.suptitle(f"{card}: measured by deskside probe", fontsize=10, fontweight="bold")
    figure.supxlabel("pale: not measured; hatched: does not fit", fontsize=7, color="#555555")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise RunError(f"{path}: the map cannot be written: {error.strerror or error}") from None


def _groups(rows: Sequence[tuple[Point, Row]]) -> list[tuple[str, Cells]]:
    together: Cells = {(_label(point), point.sequence_length): (point, row) for point, row in rows}
    if len(together) == len(rows):
        kinds = {point.options for point, _ in rows}
        return [(option_words(kinds.pop()) if len(kinds) == 1 else "", together)]
    groups: dict[str, Cells] = {}
    for point, row in rows:
        groups.setdefault(option_words(point.options), {})[_label(point), point.sequence_length] = (
            point,
            row,
        )
    return list(groups.items())


def _draw_panel(
    axes: Axes,
    panel: _Panel,
    norm: Normalize,
    cells: Cells,
    shapes: list[str],
    lengths: list[int],
    title: str,
) -> None:
    values = np.full((len(shapes), len(lengths)), np.nan)
    for (shape, length), (_, row) in cells.items():
        if row["status"] == "ok":
            values[shapes.index(shape), lengths.index(length)] = panel.value(row)
    colors = colormaps["cividis"]
    axes.imshow(np.ma.masked_invalid(values), cmap=colors, norm=norm, aspect="auto", origin="lower")
    for (shape, length), (point, row) in cells.items():
        x, y = lengths.index(length), shapes.index(shape)
        if row["status"] == "ok":
            value = values[y, x]
            text, text_color = panel.format(value), "black" if norm(value) > 0.55 else "white"
        else:
            text, text_color = STATUS_TEXT[row["status"]], "black"
            hatch = "////" if row["status"] in HATCHED else ".."
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="white", edgecolor="#999999", hatch=hatch, lw=0)
            )
        if not title:
            text += "\n" + option_words(point.options)
        box: dict[str, Any] | None = (
            None if row["status"] == "ok" else {"facecolor": "white", "edgecolor": "none", "pad": 1}
        )
        small = "\n" in text
        axes.text(
            x, y, text, ha="center", va="center", color=text_color, fontsize=6.5 if small else 8, bbox=box
        )
    axes.set_title(panel.title + (f"\n{title}" if title else ""), fontsize=9, loc="left")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
    axes.set_yticks(range(len(shapes)), shapes, fontsize=8)
    axes.set_xlabel("sequence length, tokens", fontsize=8)
    axes.set_facecolor("#eeeeee")  # not measured
    axes.set_xticks(np.arange(len(lengths) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(shapes) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _norm(values: list[float], logarithmic: bool) -> Normalize:
    if not values:
        return Normalize(0, 1)
    low, high = min(values), max(values)
    return LogNorm(low, max(high, 1.5 * low)) if logarithmic else Normalize(0, high)


def _label(point: Point) -> str:
    return f"{point.shape}\n{count(num_params(point.model))}"
