"""Draws the plots of a study, group by group, as SVG files in plots/."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deskside.report.canvas import Plot
from deskside.report.chart_data import front_axes
from deskside.report.charts import draw_bars, draw_bubbles, draw_forest, draw_front, draw_heat_maps
from deskside.report.curves import draw_curves
from deskside.report.document import Image
from deskside.report.study_text import measured_arms
from deskside.report.svg import save
from deskside.study.metrics import ENERGY, MEMORY, PRIMARY, SPEED
from deskside.study.results import Group, Results


@dataclass(frozen=True)
class Figures:
    """Drawn figures in reading order, and a sentence for each one that could not be drawn."""

    images: list[Image] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def draw(results: Results, folder: Path) -> tuple[Figures, dict[str, Figures]]:
    """Draw every figure for which the study has data: those that compare all arms, and the others by group.

    Raises OSError if writing fails.
    """
    overview = _save(draw_overview(results), folder, "", "")
    several = len(results.groups) > 1
    groups = {
        group.name: _save(draw_group(results, group), folder, prefix, f"{group.heading}: " if several else "")
        for group, prefix in zip(results.groups, _prefixes(results.groups), strict=True)
    }
    return overview, groups


def _save(plots: Iterable[Plot | str], folder: Path, prefix: str, title_prefix: str) -> Figures:
    figures = Figures()
    for plot in plots:
        if isinstance(plot, str):
            figures.missing.append(plot)
            continue
        path = folder / f"{prefix}{plot.name}.svg"
        save(plot.figure, path)
        figures.images.append(Image(path, f"{title_prefix}{plot.title}", plot.caption))
    return figures


def draw_overview(results: Results) -> Iterator[Plot | str]:
    """Yield a forest plot of all arms in each primary metric, or the reason why it cannot be drawn."""
    if not any(arm.finished() for arm in results.arms):
        yield "No charts: no trial has finished."
    elif len(results.arms) > 1:
        for key in PRIMARY:
            yield draw_forest(results, results.arms, key)


def draw_group(results: Results, group: Group) -> Iterator[Plot | str]:
    """Yield each plot of a group in reading order, or the reason why it cannot be drawn.

    The forest plots are in the overview; of a study with several groups, each group has its own, too.
    """
    arms = results.arms_in(group)
    if not any(arm.finished() for arm in arms):
        yield "No plots: no trial has finished."
        return
    if len(arms) > 1 and len(results.groups) > 1:
        for key in PRIMARY:
            yield draw_forest(results, arms, key)
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
