"""Matplotlib canvases that stay readable on a phone and in black and white.

Arms differ by position, number, line style and marker; shades of grey only repeat one of these. Matplotlib is used
through its object interface with the Agg canvas, so no global state and no display is involved.
"""

import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from deskside.utils.format import printable

WIDTH, DPI = 5.2, 170  # inches, dots per inch: text stays readable on a phone
DARK, MIDDLE, PALE = "#111111", "#6b6b6b", "#bdbdbd"
HATCH = "////"
SHADES = 48  # colors in the PNG palette


@dataclass(frozen=True)
class Plot:
    """A drawn plot that is not saved yet. `name` is its file name without group and extension."""

    name: str
    title: str
    caption: str
    canvas: Figure


def new_canvas(title: str, height: float) -> tuple[Figure, Axes]:
    """Return a titled canvas with one pair of axes; `height` is in inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The title starts at the left edge of the figure, because long row labels shift the axes to the right.
    figure.suptitle(one_line(title, 62), x=0.01, ha="left", fontsize=11, fontweight="bold")
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Apply the common grid and frame."""
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def save(canvas: Figure, path: Path) -> None:
    """Write a PNG with a small palette, a third of the size of true color. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; the table has the full name.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        surface = FigureCanvasAgg(canvas)
        surface.draw()
    picture = Image.frombuffer("RGBA", surface.get_width_height(), bytes(surface.buffer_rgba()))
    picture.convert("RGB").quantize(SHADES).save(path, format="PNG", optimize=True)


def one_line(text: str, longest: int) -> str:
    """Return one line of plain text: shortened, printable, and without `$`, which matplotlib reads as a formula."""
    return shortened(" ".join(printable(text).split()), longest).replace("$", r"\$")


def shortened(text: str, longest: int) -> str:
    """Return the text, or its beginning and its end, since two long names often differ only at the end."""
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 3
    return text[: longest - 1 - tail].rstrip(" ,") + "\u2026" + text[len(text) - tail :].lstrip(" ,")


def wrapped(text: str, columns: int, lines: int) -> str:
    """Return plain text on at most `lines` lines, shortened if it does not fit."""
    whole = " ".join(printable(text).split())
    longest = len(whole)
    while len(parts := textwrap.wrap(shortened(whole, longest), columns)) > lines:
        longest -= 1
    return "\n".join(parts).replace("$", r"\$")


def running_median(values: list[float]) -> list[float] | None:
    """Return the running median over a fortieth of the run (at least 5 points), or None for fewer than 20 points."""
    if len(values) < 20:
        return None
    half = max(2, len(values) // 80)
    return [float(np.median(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]
