"""Validation bits per byte of each language in the report of a run: a table, and a plot with one panel per language."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from deskside.report.canvas import new_figure, one_line, style_axes
from deskside.report.colors import BLUE, PALE
from deskside.report.document import Block, Image, Table
from deskside.report.svg import save
from deskside.run.record import RunRecord, mapping, number
from deskside.utils.format import UNKNOWN, count

COLUMNS = 2  # panels side by side
MAX_PANELS = 24  # more languages are only in the table
PANEL_HEIGHT = 1.5  # inches
PLOT = "val_languages.svg"
HEAD = ("language", "first evaluation", "last evaluation", "validation bytes")


def draw(record: RunRecord, folder: Path) -> list[Image]:
    """Draw the curve of each language as an SVG file in `folder`; no image if there are no languages.

    Raises OSError if the folder cannot be written.
    """
    curves = record.language_series()
    path = folder / PLOT
    if not curves:
        return []
    shown = list(curves)[:MAX_PANELS]
    title = "Validation bits per byte by language"
    num_rows = -(-len(shown) // COLUMNS)
    figure, unused = new_figure(title, 0.5 + PANEL_HEIGHT * num_rows)
    figure.delaxes(unused)
    grid = figure.subplots(num_rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    panels: list[Axes] = list(grid.ravel())
    for axes, language in zip(panels, shown, strict=False):
        style_axes(axes)
        for other in shown:
            if other != language:
                axes.plot(*curves[other], color=PALE, linewidth=0.7)
        x, y = curves[language]
        axes.plot(x, y, color=BLUE, linewidth=1.6, marker="o", markersize=3)
        axes.set_title(f"{one_line(language, 18)}: {y[-1]:.3f}", loc="left", fontsize=10)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel("training tokens", fontsize=10.5)
    figure.supylabel("bits per byte of text", fontsize=10.5)
    save(figure, path)
    left_out = len(curves) - len(shown)
    caption = f"{title}, lower is better; in gray the other languages. The number is the last evaluation."
    if left_out:
        caption += f" {left_out} more languages are in the table only."
    return [Image(path, title, f"{caption} All values are measured.")]


def blocks(record: RunRecord, images: Sequence[Image]) -> list[Block]:
    """Return the table of all languages and the images; nothing if the run has no languages."""
    curves = record.language_series()
    if not curves:
        return []
    final = mapping(record.summary.get("val_languages"))
    epochs = mapping(record.summary.get("mixture_epochs")) or mapping(record.plan.get("mixture_epochs"))

    def epochs_of(language: str) -> str:
        found = number(epochs.get(language))
        return UNKNOWN if found is None else f"{found:.2f}"

    rows = [
        (
            language,
            f"{y[0]:.3f}",
            f"{y[-1]:.3f}",
            count(number(mapping(final.get(language)).get("bytes"))),
            *((epochs_of(language),) if epochs else ()),
        )
        for language, (_, y) in curves.items()
    ]
    mean = sum(y[-1] for _, y in curves.values()) / len(curves)
    return [
        Table((*HEAD, *(("epochs trained",) if epochs else ())), rows),
        f"Bits per byte of each language (measured, lower is better). Their unweighted mean is {mean:.3f}; the "
        "validation result of the run weighs each language by its bytes. Scripts differ in bytes per character, so "
        "compare runs in one language, not languages with each other.",
        *images,
    ]
