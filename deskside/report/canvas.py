"""Matplotlib figures that stay readable on a phone and in black and white.

Arms are distinguished by position, number, line style and marker, never by color alone. Matplotlib is used through its
object interface with the Agg canvas, so it needs no global state and no display.
"""

import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from deskside.utils.format import printable

WIDTH, DPI = 5.2, 170  # inches, dots per inch: text stays readable on a phone
DARK, MIDDLE, PALE = "#111111", "#6b6b6b", "#bdbdbd"
HATCH = "////"
PALETTE_SIZE = 48  # colors


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
    figure.suptitle(one_line(title, 62), x=0.01, ha="left", fontsize=11, fontweight="bold")
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Apply the common grid and frame."""
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG with a small palette, which is smaller than true color. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # The font draws characters that it lacks as boxes; the table in the report has the full name.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
    image.convert("RGB").quantize(PALETTE_SIZE).save(path, format="PNG", optimize=True)


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
