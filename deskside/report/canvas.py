"""Matplotlib figures that stay readable on a phone and in black and white. `svg.py` writes them.

A figure is as wide as a phone, and its points are the pixels of the page. On a wide page, figures stand side by side
instead of growing.

Arms are distinguished by position, number, line style and marker, never by color alone. Matplotlib is used through its
object interface with the Agg canvas, so it needs no global state and no display.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deskside.report.colors import GRID
from deskside.utils.format import printable

WIDTH, DPI = 5.2, 72  # inches, dots per inch: a dot is a CSS pixel

HATCH = "////"
STRONGEST = 0.6  # opacity of the strongest cell of a heat map, on which text stays readable


@dataclass(frozen=True)
class Plot:
    """A drawn plot that is not saved yet. `name` is its file name without the group prefix and the extension."""

    name: str
    title: str
    caption: str
    figure: Figure


def new_figure(title: str, height: float) -> tuple[Figure, Axes]:
    """Return a titled figure with one pair of axes; `height` is in inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The title starts at the left edge of the figure, because long row labels shift the axes to the right.
    figure.suptitle(wrapped(title, 46, 2), x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Apply the common grid and frame."""
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)


def row_inches(labels: Sequence[str]) -> float:
    """Return the height of a row of a chart with these wrapped labels."""
    return 0.36 if any("\n" in label for label in labels) else 0.26


def one_line(text: str, max_length: int) -> str:
    """Return one line of printable text, shortened, with `$` escaped because matplotlib reads it as a formula."""
    return shortened(" ".join(printable(text).split()), max_length).replace("$", r"\$")


def shortened(text: str, max_length: int) -> str:
    """Return the text, or its beginning and end if it is too long: long names often differ only at the end."""
    if len(text) <= max_length:
        return text
    tail = (max_length - 1) // 3
    return text[: max_length - 1 - tail].rstrip(" ,") + "\u2026" + text[len(text) - tail :].lstrip(" ,")


def wrapped(text: str, columns: int, max_lines: int) -> str:
    """Return plain text on at most `max_lines` lines, shortened if it does not fit."""
    whole = " ".join(printable(text).split())
    max_length = len(whole)
    while len(lines := textwrap.wrap(shortened(whole, max_length), columns)) > max_lines:
        max_length -= 1
    return "\n".join(lines).replace("$", r"\$")
