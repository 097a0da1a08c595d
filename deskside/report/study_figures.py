"""Draws the plots of a study, group by group, as PNG files in plots/."""

import re
from collections.abc import Iterator
from pathlib import Path

from deskside.report.canvas import Plot, save
from deskside.report.chart_data import front_axes
from deskside.report.charts import draw_bars, draw_bubbles, draw_forest, draw_front, draw_heat_maps
from deskside.report.curves import draw_curves
from deskside.report.document import Image
from deskside.report.study_text import measured_arms
from deskside.study.results import Group, Results
from deskside.study.stats.metrics import ENERGY, MEMORY, PRIMARY, SPEED


def draw(results: Results, folder: Path) -> tuple[dict[str, list[Image]], dict[str, list[str]]]:
    """Draw every plot for which the study has data. Return the images and the reasons for missing plots, by group.

    Other PNG files in `folder` are from an earlier report and are removed. Raises OSError if writing fails.
    """
    images: dict[str, list[Image]] = {}
    missing: dict[str, list[str]] = {}
    written_names = set()
    for group, prefix in zip(results.groups, _prefixes(results.groups), strict=True):
        images[group.name], missing[group.name] = [], []
        for plot in draw_group(results, group):
            if isinstance(plot, str):
                missing[group.name].append(plot)
                continue
            path = folder / f"{prefix}{plot.name}.png"
            save(plot.figure, path)
            written_names.add(path.name)
            title = plot.title if len(results.groups) == 1 else f"{group.heading}: {plot.title}"
            images[group.name].append(Image(path, title, plot.caption))
    for path in folder.glob("*.png"):
        if path.name not in written_names:
            path.unlink()
    return images, missing


def draw_group(results: Results, group: Group) -> Iterator[Plot | str]:
    """Yield each plot of a group in reading order, or the reason why it cannot be drawn."""
    arms = results.arms_in(group)
    if not any(arm.finished() for arm in arms):
        yield "No plots: no trial has finished."
        return
    if len(arms) > 1:
        for key in PRIMARY:
            yield draw_forest(results, group, key)
    for x_key in ("seconds", "tokens"):
        yield draw_curves(results, group, x_key)
    for key in (SPEED, MEMORY):
        yield draw_bars(results, group, key)
    if measured_arms(arms, ENERGY):  # only GPUs report their power
        yield draw_bars(results, group, ENERGY)
    if len(arms) > 1:
        yield draw_bubbles(results, group)
        drawn_axes = set()
        for front in sorted(results.fronts, key=lambda f: len(f.metrics)):
            # A front in three metrics is drawn in two of them; skip it if another front has the same two axes.
            if front.group == group.name and len(front.metrics) > 1 and front_axes(front) not in drawn_axes:
                drawn_axes.add(front_axes(front))
                yield draw_front(results, group, front)
        yield from draw_heat_maps(results, group)


def _prefixes(groups: list[Group]) -> list[str]:
    """Return a unique file name prefix for each group; an empty one if there is only one group."""
    if len(groups) == 1:
        return [""]
    names: list[str] = []
    for number, group in enumerate(groups, start=1):
        file_name = re.sub(r"[^a-zA-Z0-9_]+", "_", group.name).strip("_")[:40]
        taken = {name.casefold() for name in names}  # without case, because some file systems ignore it
        if not file_name or file_name.casefold() in taken:
            file_name = f"{file_name}_{number}"
        while file_name.casefold() in taken:
            file_name += "_"
        names.append(file_name)
    return [f"{name}-" for name in names]
