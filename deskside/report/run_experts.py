"""The experts in the report of a run: heat maps of their load by layer and by language, and the imbalance over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from deskside.report.canvas import STRONGEST, new_figure, one_line
from deskside.report.colors import BLUE, INK, PALE
from deskside.report.curve_data import running_median
from deskside.report.document import Block, Image, Table
from deskside.report.svg import save
from deskside.run.expert_load import (
    ExpertLoad,
    layer_with_differences,
    load_by_language,
    newest_load,
    relative,
)
from deskside.run.record import RunRecord

LAYERS, IMBALANCE, LANGUAGES = "expert_load.svg", "load_imbalance.svg", "expert_languages.svg"
MAX_TEXT_COLUMNS = 16  # cells have their number if there are at most so many columns
MAX_ROWS = 48  # more rows have no label each
LEGEND = "1 is an even share: a stronger color is a larger load; all values are measured."


def draw(record: RunRecord, folder: Path) -> list[Image]:
    """Draw the plots of a run with experts as SVG files in `folder`; no images for other runs.

    Raises OSError if the folder cannot be written.
    """
    load, by_language = newest_load(record.metrics), load_by_language(record)
    figures: dict[str, tuple[Figure, str, str] | None] = {
        LAYERS: None if load is None else _draw_layers(load),
        IMBALANCE: _draw_imbalance(record) if record.series("load_imbalance")[0] else None,
        LANGUAGES: draw_languages(by_language) if len(by_language) > 1 else None,
    }
    images = []
    for name, drawn in figures.items():
        if drawn is None:
            continue
        figure, title, caption = drawn
        save(figure, folder / name)
        images.append(Image(folder / name, title, caption))
    return images


def blocks(record: RunRecord, images: Sequence[Image]) -> list[Block]:
    """Return the images and a table of the layers; nothing if the run has no experts."""
    load = newest_load(record.metrics)
    if load is None:
        return []
    layers = zip(load.relative_LE, load.entropy_L, load.dropped_L, strict=True)
    rows = [
        (str(layer), f"{max(shares):.2f}", f"{min(shares):.2f}", f"{entropy:.3f}", f"{dropped:.0f}")
        for layer, (shares, entropy, dropped) in enumerate(layers)
    ]
    even = float(np.log(len(load.load_LE[0])))
    return [
        *images,
        f"Step {load.step:,}, measured. A load is an expert's share of the choices divided by the even share, so 1 is "
        f"even; the largest load is {load.imbalance:.2f} on average over the layers. The entropy is that of a token's "
        f"probabilities in the router, in nats; equal probabilities have {even:.3f}. Dropped tokens are choices that "
        "no expert computed.",
        Table(("layer", "largest load", "smallest load", "router entropy", "dropped tokens"), rows),
    ]


def _draw_layers(load: ExpertLoad) -> tuple[Figure, str, str]:
    names = [str(layer) for layer in range(len(load.load_LE))]
    title = "Load of the experts by layer"
    figure = _heat_map(title, load.relative_LE, names, "layer")
    return figure, title, f"{title} at step {load.step:,}. {LEGEND}"


def draw_languages(by_language: dict[str, list[list[float]]]) -> tuple[Figure, str, str]:
    """Return a heat map of the experts' loads in each language (layers, experts), with its title and caption."""
    layer = layer_with_differences(by_language)
    cells = relative([load[layer] for load in by_language.values()])
    title = f"Load of the experts by language, layer {layer}"
    figure = _heat_map(title, cells, list(by_language), "")
    return figure, title, f"{title}, in which languages differ most, on the validation text. {LEGEND}"


def _heat_map(title: str, cells: list[list[float]], rows: list[str], row_label: str) -> Figure:
    """Draw relative loads as shades of one color; 2 and more is the strongest."""
    columns = len(cells[0])
    figure, axes = new_figure(title, 0.9 + (0.26 if len(rows) <= MAX_ROWS else 0.12) * max(len(rows), 3))
    # One color with the load as its opacity is right on a light and a dark page, and is one image for all cells.
    opacity = STRONGEST * np.clip(np.array(cells), 0.0, 2.0) / 2.0
    color = np.broadcast_to(to_rgb(BLUE), (*opacity.shape, 3))
    axes.imshow(np.dstack([color, opacity]), aspect="auto", interpolation="none")
    if columns <= MAX_TEXT_COLUMNS and len(rows) <= MAX_ROWS:
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9, color=INK)
    axes.set_xlabel("expert", fontsize=10.5)
    axes.set_ylabel(row_label, fontsize=10.5)
    if len(rows) <= MAX_ROWS:
        axes.set_yticks(range(len(rows)), [one_line(name, 18) for name in rows], fontsize=9.5)
    if columns <= MAX_TEXT_COLUMNS:
        axes.set_xticks(range(columns), [str(expert) for expert in range(columns)])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _draw_imbalance(record: RunRecord) -> tuple[Figure, str, str]:
    title = "Load imbalance"
    figure, axes = new_figure(title, 2.6)
    x, y = record.series("load_imbalance")
    median = running_median(y)
    if median is not None:
        axes.plot(x, y, color=PALE, linewidth=0.8, label="each logged step")
    axes.plot(x, median or y, color=BLUE, linewidth=1.6, marker="o" if len(x) < 3 else "", markersize=5,
              label="running median" if median else None)  # fmt: skip
    axes.axhline(1.0, color=INK, linewidth=1.1, linestyle=(0, (6, 3)), label="even")
    axes.set_ylabel("largest load of an expert", fontsize=10.5)
    axes.set_xlabel("training tokens", fontsize=10.5)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(0, max(x) * 1.02 or 1)
    axes.set_ylim(bottom=0.95)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=10.5)
    caption = f"{title}: the largest load of a layer, averaged over the layers. 1 is an even share."
    return figure, title, f"{caption} All values are measured."
