"""The plots of a study, group by group, as PNG files in plots/."""

import re
from collections.abc import Iterator
from pathlib import Path

from deskside.report.document import Figure
from deskside.report.study_canvas import Drawn, save
from deskside.report.study_curves import curves
from deskside.report.study_effects import forest, heat
from deskside.report.study_levels import axes_of, bars, bubbles, front
from deskside.report.study_words import ENERGY, MEMORY, PRIMARY, SPEED, arms_of, group_title, measured
from deskside.study.results import Group, Results


def draw(results: Results, folder: Path) -> tuple[dict[str, list[Figure]], dict[str, list[str]]]:
    """Draw what each group has the numbers for. Returns, by group, its figures and why others are missing.

    Plots of an earlier report that are not drawn any more are removed. Raises OSError when `folder` cannot be written.
    """
    figures: dict[str, list[Figure]] = {}
    absent: dict[str, list[str]] = {}
    written = set()
    for group, prefix in zip(results.groups, _prefixes(results.groups), strict=True):
        figures[group.name], absent[group.name] = [], []
        for drawn in plots(results, group):
            if isinstance(drawn, str):
                absent[group.name].append(drawn)
                continue
            path = folder / f"{prefix}{drawn.name}.png"
            folder.mkdir(parents=True, exist_ok=True)
            save(drawn, path)
            written.add(path.name)
            title = drawn.title if len(results.groups) == 1 else f"{group_title(group)}: {drawn.title}"
            figures[group.name].append(Figure(path, title, drawn.caption))
    for old in folder.glob("*.png"):
        if old.name not in written:
            old.unlink()
    return figures, absent


def plots(results: Results, group: Group) -> Iterator[Drawn | str]:
    """Every plot of a group in reading order, or the sentence that says why there is none."""
    arms = arms_of(results, group)
    if not any(arm.finished() for arm in arms):
        yield "No plots: no trial has come to its end."
        return
    if len(arms) > 1:
        for key in PRIMARY:
            yield forest(results, group, key)
    for across in ("seconds", "tokens"):
        yield curves(results, group, across)
    for key in (SPEED, MEMORY):
        yield bars(results, group, key)
    if measured(arms, ENERGY):  # only cards tell their power
        yield bars(results, group, ENERGY)
    if len(arms) > 1:
        yield bubbles(results, group)
        seen = set()
        for found in sorted(results.fronts, key=lambda f: len(f.metrics)):
            # A front in three metrics would be the picture of two of them again; the table has it.
            if found.group == group.name and len(found.metrics) > 1 and axes_of(found) not in seen:
                seen.add(axes_of(found))
                yield front(results, group, found)
        yield from heat(results, group)


def _prefixes(groups: list[Group]) -> list[str]:
    """What the file names of each group begin with: nothing for a single one, else its name, safe and unique."""
    if len(groups) == 1:
        return [""]
    names: list[str] = []
    for place, group in enumerate(groups, start=1):
        safe = re.sub(r"[^a-zA-Z0-9_]+", "_", group.name).strip("_")[:40]
        names.append(safe if safe and safe not in names else f"{safe}_{place}")
    return [f"{name}-" for name in names]
