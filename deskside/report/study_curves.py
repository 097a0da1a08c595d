"""Loss against time and against tokens: a mean over seeds per arm, between the lowest and the highest seed."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

from deskside.report.figures import smoothed
from deskside.report.study_canvas import (
    DARK,
    MIDDLE,
    Drawn,
    canvas,
    dress,
    label,
    left_out,
    telling,
    wrapped,
)
from deskside.report.study_words import QUALITY, arms_of, short_labels, strata
from deskside.run.record import number
from deskside.study.results import Arm, Group, Results, Trial

MOST_PANELS, MOST_CURVES = 4, 6
STYLES: tuple[tuple[Any, str, str], ...] = (  # dashes, marker, shade
    ("-", "o", DARK),
    ((0, (6, 2)), "s", "#0b4f8a"),
    ((0, (2, 1.5)), "^", "#a2410b"),
    ((0, (7, 2, 1.5, 2)), "D", "#1b6b4a"),
    ((0, (1, 1.5)), "v", "#6a2f86"),
    ((0, (4, 1.5, 1, 1.5, 1, 1.5)), "P", MIDDLE),
)  # fmt: skip
EARLY = 0.35  # the view begins at what the slowest arm has reached after this part of the axis
Points = list[tuple[float, float]]


def curves(results: Results, group: Group, across: str) -> Drawn | str:
    """Loss against `across` ("tokens" or "seconds"), one panel for each baseline and the arms against it.

    Validation bits per byte where the trials were evaluated on their way, else the loss of the training batches.
    """
    of = "time" if across == "seconds" else across
    arms = [arm for arm in arms_of(results, group) if arm.finished()]
    key = "val_bpb" if _enough(arms, "val_bpb", across, 3) else "loss"
    have = [arm for arm in arms if _seeds(arm, key, across)]
    if not have:
        return f"No curves of loss against {of}: no trial has come to its end."
    blocks = strata(have)
    panels = blocks[:MOST_PANELS]
    words = "validation loss (bits per byte)" if key == "val_bpb" else "training loss (nats per token)"
    title = f"{words.split(' (')[0].capitalize()} against {of}"
    figure, first = canvas(title, 0.5 + 2.75 * len(panels))
    figure.delaxes(first)
    grid: list[Axes] = list(figure.subplots(len(panels), 1, squeeze=False)[:, 0])
    names, shown = short_labels(results, have), []
    cut = False
    for axes, (base, members) in zip(grid, panels, strict=True):
        dress(axes)
        kept = telling(members, QUALITY, MOST_CURVES)
        shown += kept
        cut = _panel(axes, kept, names, key, across) or cut
        named = results.arm(base)
        if len(blocks) > 1:
            axes.set_title(label(named.label if named else base, 60), loc="left", fontsize=9)
        axes.set_ylabel(words.replace(" (", "\n("), fontsize=8.5)
    grid[-1].set_xlabel(_axis(grid, across), fontsize=9)
    counts = sorted({len(_seeds(arm, key, across)) for arm in shown})
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    caption = (
        f"Line: mean over {n} seed{'' if n == '1' else 's'}"
        f"{'' if counts == [1] else '; band: from the lowest to the highest seed'}. "
        f"{'Compile, evaluation and checkpoints are not in the time. ' if across == 'seconds' else ''}"
        f"{'The first steps are cut off above. ' if cut else ''}Measured."
    )
    over = (
        f" Panels of {len(blocks) - MOST_PANELS} more baselines are left out."
        if len(blocks) > MOST_PANELS
        else ""
    )
    return Drawn(f"loss_{of}", title, caption + left_out(have, shown) + over, figure)


def _axis(panels: Sequence[Axes], across: str) -> str:
    """Write tokens as 50M, and time in the unit that suits all panels; returns the axis's words."""
    if across == "tokens":
        for axes in panels:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        return "training tokens"
    longest = max(axes.get_xlim()[1] for axes in panels)
    unit, size = next(((u, s) for u, s in (("h", 3600), ("min", 60)) if longest > 3 * s), ("s", 1))
    for axes in panels:
        axes.xaxis.set_major_locator(MultipleLocator(size * _step(axes.get_xlim()[1] / size)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / size:g}"))
    return f"training time ({unit})"


def _step(length: float) -> float:
    """A round step that gives four to eight marks."""
    power = 10.0 ** math.floor(math.log10(length / 4))
    return max(power * part for part in (1, 2, 2.5, 5) if power * part <= length / 4)


def _panel(axes: Axes, arms: Sequence[Arm], names: dict[str, str], key: str, across: str) -> bool:
    """Draw the arms of one baseline; returns whether the view cuts off the beginning."""
    finals, heights, furthest = [], [], 0.0
    for arm, (dashes, marker, shade) in zip(arms, STYLES, strict=False):
        x, middle, low, high = _band(_seeds(arm, key, across))
        every = max(1, len(x) // 6)
        axes.plot(x, middle, color=shade, linestyle=dashes, linewidth=1.5, marker=marker, markersize=4.5,
                  markevery=every, markerfacecolor="white", label=names[arm.id])  # fmt: skip
        if np.any(high > low):
            axes.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0)
        finals.append((float(x[-1]), float(middle[-1]), names[arm.id], shade))
        furthest = max(furthest, float(x[-1]))
        heights.append((x, middle, low, high))
    axes.set_xlim(0, furthest * 1.02 or 1.0)
    seen = [float(np.interp(EARLY * furthest, x, middle)) for x, middle, _, _ in heights]
    bottom, top = min(float(low.min()) for _, _, low, _ in heights), max(seen)
    highest = max(float(high.max()) for *_, high in heights)
    cut = highest > top > bottom
    if cut:
        axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.04 * (top - bottom))
    _names(axes, finals)
    return cut


def _names(axes: Axes, finals: list[tuple[float, float, str, str]]) -> None:
    """Each curve's name at the right of the panel, at its end's height or as near as the others leave room for."""
    low, high = axes.get_ylim()
    step = 0.105 * (high - low)
    places: list[float] = []
    ordered = sorted(finals, key=lambda final: final[1])
    for _, y, _, _ in ordered:
        places.append(max(y, places[-1] + step if places else low + 0.4 * step))
    over = max(0.0, places[-1] - (high - 0.4 * step))
    ceiling = np.inf
    for index in range(len(places) - 1, -1, -1):  # pushed back down from the top where they went over it
        places[index] = min(places[index], places[-1] - over if index == len(places) - 1 else ceiling)
        ceiling = places[index] - step
    for (x, y, name, shade), place in zip(ordered, places, strict=True):
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": shade, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(wrapped(name, 20, 2), (x, y), xytext=(1.04, place), textcoords=axes.get_yaxis_transform(),
                      fontsize=7.5, va="center", color=shade, annotation_clip=False, linespacing=0.9,
                      arrowprops=leader)  # fmt: skip


def _seeds(arm: Arm, key: str, across: str) -> list[Points]:
    return [points for trial in arm.finished() if len(points := _points(trial, key, across)) >= 1]


def _points(trial: Trial, key: str, across: str) -> Points:
    """(x, y) in order of x, of the rows that have both; a noisy training loss as its running median."""
    pairs = [(number(row.get(across)), number(row.get(key))) for row in trial.curve]
    points = sorted((x, y) for x, y in pairs if x is not None and y is not None)
    smooth = smoothed([y for _, y in points]) if key == "loss" else None
    return [(x, y) for (x, _), y in zip(points, smooth, strict=True)] if smooth else points


def _enough(arms: Sequence[Arm], key: str, across: str, least: int) -> bool:
    found = [len(points) for arm in arms for points in _seeds(arm, key, across)]
    return bool(found) and min(found) >= least


def _band(seeds: list[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, lowest, highest) over seeds at the points that any of them has, where all of them reach."""
    start = max(points[0][0] for points in seeds)
    stop = min(points[-1][0] for points in seeds)
    grid = np.array(sorted({x for points in seeds for x, _ in points if start <= x <= stop}) or [stop])
    lines = np.array([np.interp(grid, *np.array(points).T) for points in seeds])
    return grid, lines.mean(axis=0), lines.min(axis=0), lines.max(axis=0)
