"""What the plots of a study share: a canvas that stays readable on a phone and in black and white, labels, marks.

A plot is a `Drawn` (a canvas that nobody has saved yet, and its words) or a sentence that says why there is none. Arms
differ by place, number, line style and marker; shade only repeats what one of these says already.
"""

import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from PIL import Image

from deskside.report.document import clean
from deskside.report.study_words import comparison, known, short_labels, status
from deskside.study.results import Arm, Results

WIDTH, DPI = 5.2, 170  # inches, dots per inch: as the plots of a run
DARK, MIDDLE, PALE = "#111111", "#6b6b6b", "#bdbdbd"
HATCH = "////"
MOST_ROWS = 40
SHADES = 48


@dataclass(frozen=True)
class Drawn:
    """A finished plot. name: of its file, without the group and the ending."""

    name: str
    title: str
    caption: str
    canvas: Canvas
    wide: bool = False


def canvas(title: str, height: float) -> tuple[Canvas, Axes]:
    """A titled canvas of the house's width with one pair of axes. height in inches."""
    figure = Canvas(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The title starts at the paper's edge: above axes with long row labels it would begin in the middle.
    figure.suptitle(label(title, 62), x=0.01, ha="left", fontsize=11, fontweight="bold")
    dress(axes)
    return figure, axes


def dress(axes: Axes) -> None:
    """The house's grid and frame."""
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def save(drawn: Drawn, path: Path) -> None:
    """Write the plot as a PNG of few shades, which is a third of the size. Raises OSError."""
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; the table has it in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        surface = FigureCanvasAgg(drawn.canvas)
        surface.draw()
    picture = Image.frombuffer("RGBA", surface.get_width_height(), bytes(surface.buffer_rgba()))
    picture.convert("RGB").quantize(SHADES).save(path, format="PNG", optimize=True)


def label(text: str, longest: int) -> str:
    """One line of plain text for a plot: shortened, no control characters, and nothing that is read as a formula."""
    return shortened(" ".join(clean(text).split()), longest).replace("$", r"\$")


def shortened(text: str, longest: int) -> str:
    """The text, or its beginning and its end, which is often what tells two long names apart."""
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 3
    return text[: longest - 1 - tail].rstrip(" ,") + "\u2026" + text[len(text) - tail :].lstrip(" ,")


def wrapped(text: str, columns: int, lines: int) -> str:
    """Plain text for a plot over a few lines."""
    whole = " ".join(clean(text).split())
    longest = len(whole)
    while len(parts := textwrap.wrap(shortened(whole, longest), columns)) > lines:
        longest -= 1
    return "\n".join(parts).replace("$", r"\$")


def telling(arms: Sequence[Arm], key: str, most: int) -> list[Arm]:
    """At most `most` arms in their order: baselines, then those that differ the most from theirs in one metric.

    An arm without a comparison counts as no different.
    """

    def weight(arm: Arm) -> tuple[bool, float]:
        found = comparison(arm, key)
        return arm.id == arm.baseline, abs(found.relative) if found is not None else -1.0

    kept = {arm.id for arm in sorted(arms, key=weight, reverse=True)[:most]}
    return [arm for arm in arms if arm.id in kept]


def left_out(all_: Sequence[Arm], shown: Sequence[Arm]) -> str:
    """A sentence for the caption where not every arm is drawn; the empty text where all are."""
    missing = len(all_) - len(shown)
    if not missing:
        return ""
    return f" {missing} of {len(all_)} arms are left out here (those that differ least); the table has all."


def row_names(results: Results, arms: Sequence[Arm], emulated: bool) -> list[str]:
    """Names for rows: short ones where all arms have one baseline. emulated: say it of the arms that are."""
    names = {arm.id: arm.label for arm in arms}
    if len({arm.baseline for arm in arms}) == 1:
        names = short_labels(results, list(arms))
    return [
        wrapped(names[arm.id] + (" (emulated)" if emulated and arm.emulated else ""), 26, 2) for arm in arms
    ]


def ends(arm: Arm, key: str) -> tuple[float, float, float] | None:
    """(mean, how far down its interval reaches, how far up); zeros without an interval, None where not measured."""
    found = known(arm, key)
    if found is None:
        return None
    low, high = (found.mean if end is None else end for end in (found.low, found.high))
    return found.mean, max(0.0, found.mean - low), max(0.0, high - found.mean)


def why_missing(arm: Arm) -> str:
    """What stands in the place of a number: how the arm ended."""
    return "not measured" if arm.status == "finished" else status(arm.status)
