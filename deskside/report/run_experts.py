"""The experts in the report of a run: heat maps of their load by layer and by language, and the imbalance over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from deskside.report.canvas import save
from deskside.report.document import Block, Image, Table
from deskside.run.expert_load import (
    ExpertLoad,
    layer_with_differences,
    load_by_language,
    newest_load,
    relative,
)
from deskside.run.record import RunRecord

LAYERS, IMBALANCE, LANGUAGES = "expert_load.png", "load_imbalance.png", "expert_languages.png"
MAX_TEXT_COLUMNS = 16  # cells have their number if there are at most so many columns
MAX_ROWS = 48  # more rows have no label each
LEGEND = "1 is an even share: light is less, dark is more; all values are measured."


def draw(record: RunRecord, folder: Path) -> list[Image]:
    """Draw the plots of a run with experts as PNG files in `folder`; no images for other runs.

    Raises OSError if the folder cannot be written.
    """
    load, by_language = newest_load(record.metrics), load_by_language(record)
    figures: dict[str, tuple[Figure, str, str] | None] = {
        LAYERS: None if load is None else _draw_layers(load),
        IMBALANCE: _draw_imbalance(record) if record.series("load_imbalance")[0] else None,
        LANGUAGES: _draw_languages(by_language) if len(by_language) > 1 else None,
    }
    images = []
    for name, drawn in figures.items():
        if drawn is None:
            (folder / name).unlink(missing_ok=True)  # left over from an earlier report
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
    layers = zip(load.relative_LE, load.entropy_L, strict=True)
    rows = [
        (str(layer), f"{max(shares):.2f}", f"{min(shares):.2f}", f"{entropy:.3f}", "0")
        for layer, (shares, entropy) in enumerate(layers)
    ]
    even = float(np.log(len(load.load_LE[0])))
    return [
        *images,
        f"Step {load.step:,}, measured. A load is an expert's share of the choices over the even share, so 1 is even; "
        f"the largest load is {load.imbalance:.2f} on average over the layers. The entropy is that of a token's "
        f"probabilities in the router, in nats; {even:.3f} is undecided. No choice is dropped: every expert computes "
        "all tokens that chose it.",
        Table(("layer", "largest load", "smallest load", "router entropy", "dropped tokens"), rows),
    ]


def _draw_layers(load: ExpertLoad) -> tuple[Figure, str, str]:
    names = [str(layer) for layer in range(len(load.load_LE))]
    title = "Load of the experts by layer"
    figure = _heat_map(title, load.relative_LE, names, "layer")
    return figure, title, f"{title} at step {load.step:,}. {LEGEND}"


def _draw_languages(by_language: dict[str, list[list[float]]]) -> tuple[Figure, str, str]:
    layer = layer_with_differences(by_language)
    cells = relative([load[layer] for load in by_language.values()])
    title = f"Load of the experts by language, layer {layer}"
    figure = _heat_map(title, cells, list(by_language), "")
    caption = f"{title}: the largest load of a layer, averaged over the layers. 1 is an even share."
    return figure, title, f"{caption} All values are measured."
