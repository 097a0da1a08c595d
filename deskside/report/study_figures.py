"""The plots of a study, group by group, as PNG files in plots/."""

import re
from collections.abc import Iterator
from pathlib import Path

from deskside.report.canvas import Plot, save
from deskside.report.chart_data import front_axes
from deskside.report.charts import bars, bubbles, forest, front, heat_maps
from deskside.report.curves import curves
from deskside.report.document import Image
from deskside.report.study_text import measured_arms
from deskside.study.results import Group, Results
from deskside.study.stats.metrics import ENERGY, MEMORY, PRIMARY, SPEED


def draw(results: Results, folder: Path) -> tuple[dict[str, list[Image]], dict[str, list[str]]]:
    """Draw every plot that a study has the numbers for. Return, by group, the images and reasons for missing ones.

    Plots of an earlier report that no longer exist are removed. Raises OSError if `folder` cannot be written.
    """
    images: dict[str, list[Image]] = {}
    absent: dict[str, list[str]] = {}
    written = set()
    for group, prefix in zip(results.groups, _prefixes(results.groups), strict=True):
        images[group.name], absent[group.name] = [], []
        for plot in plots(results, group):
            if isinstance(plot, str):
                absent[group.name].append(plot)
                continue
            path = folder / f"{prefix}{plot.name}.png"
            save(plot.canvas, path)
            written.add(path.name)
            title = plot.title if len(results.groups) == 1 else f"{group.heading}: {plot.title}"
            images[group.name].append(Image(path, title, plot.caption))
    for old in folder.glob("*.png"):
        if old.name not in written:
            old.unlink()
    return images, absent


def plots(results: Results, group: Group) -> Iterator[Plot | str]:
    """Yield every plot of a group in reading order, or the reason why there is none."""
    arms = results.arms_in(group)
    if not any(arm.finished() for arm in arms):
        yield "No plots: no trial has finished."
        return
    if len(arms) > 1:
        for key in PRIMARY:
            yield forest(results, group, key)
    for across in ("seconds", "tokens"):
        yield curves(results, group, across)
    for key in (SPEED, MEMORY):
        yield bars(results, group, key)
    if measured_arms(arms, ENERGY):  # only GPUs report their power
        yield bars(results, group, ENERGY)
    if len(arms) > 1:
        yield bubbles(results, group)
        seen = set()
        for found in sorted(results.fronts, key=lambda f: len(f.metrics)):
            # A front in three metrics would show the same two again; the table has it.
            if found.group == group.name and len(found.metrics) > 1 and front_axes(found) not in seen:
                seen.add(front_axes(found))
                yield front(results, group, found)
        yield from heat_maps(results, group)


def _prefixes(groups: list[Group]) -> list[str]:
    """Return the safe and unique prefix of each group's file names; empty for a single group."""
    if len(groups) == 1:
        return [""]
    names: list[str] = []
    for place, group in enumerate(groups, start=1):
        safe = re.sub(r"[^a-zA-Z0-9_]+", "_", group.name).strip("_")[:40]
        names.append(safe if safe and safe not in names else f"{safe}_{place}")
    return [f"{name}-" for name in names]
