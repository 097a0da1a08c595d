"""Loss curves of a study: the mean over seeds of each arm, with a band from the lowest to the highest seed."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

from deskside.report.canvas import (
    DARK,
    MIDDLE,
    Plot,
    new_canvas,
    one_line,
    running_median,
    style_axes,
    wrapped,
)
from deskside.report.chart_data import CURVE_TITLES, Curve, curve, most_different
from deskside.report.charts import left_out
from deskside.report.study_text import by_baseline, seed_range, short_labels
from deskside.study.results import Arm, Group, Results
from deskside.study.stats.metrics import QUALITY

MAX_PANELS, MAX_CURVES = 4, 6
STYLES: tuple[tuple[Any, str, str], ...] = (  # dashes, marker, shade
    ("-", "o", DARK),
    ((0, (6, 2)), "s", "#0b4f8a"),
    ((0, (2, 1.5)), "^", "#a2410b"),
    ((0, (7, 2, 1.5, 2)), "D", "#1b6b4a"),
    ((0, (1, 1.5)), "v", "#6a2f86"),
    ((0, (4, 1.5, 1, 1.5, 1, 1.5)), "P", MIDDLE),
)
EARLY = 0.35  # the top of the view is what the slowest arm has reached after this part of the axis


def curves(results: Results, group: Group, across: str) -> Plot | str:
    """Draw loss against `across` ("tokens" or "seconds"), with one panel for each baseline and its arms.

    The loss is validation bits per byte if all trials were evaluated during training, else the training loss.
    """
    versus = "time" if across == "seconds" else across
    arms = [arm for arm in results.arms_in(group) if arm.finished()]
    key = "val_bpb"
    seeds = {arm.id: _seeds(arm, key, across) for arm in arms}
    lengths = [len(points) for trials in seeds.values() for points in trials]
    if not lengths or min(lengths) < 3:
        key = "loss"
        seeds = {arm.id: _seeds(arm, key, across) for arm in arms}
    have = [arm for arm in arms if seeds[arm.id]]
    if not have:
        return f"No curves of loss against {versus}: no trial has finished."
    blocks = by_baseline(have)
    panels = blocks[:MAX_PANELS]
    name, unit = CURVE_TITLES[key].split(", ")
    title = f"{name.capitalize()} against {versus}"
    figure, first = new_canvas(title, 0.5 + 2.75 * len(panels))
    figure.delaxes(first)
    grid: list[Axes] = list(figure.subplots(len(panels), 1, squeeze=False)[:, 0])
    names, shown = short_labels(results, have), []
    clipped = False
    for axes, (base, members) in zip(grid, panels, strict=True):
        style_axes(axes)
        kept = most_different(members, QUALITY, MAX_CURVES)
        shown += kept
        clipped |= _panel(axes, [(names[arm.id], seeds[arm.id]) for arm in kept])
        if len(blocks) > 1:
            named = results.arm(base)
            axes.set_title(one_line(named.label if named else base, 60), loc="left", fontsize=9)
        axes.set_ylabel(f"{name}\n({unit})", fontsize=8.5)
    grid[-1].set_xlabel(_format_x(grid, across), fontsize=9)
    counts = {len(seeds[arm.id]) for arm in shown}
    sentences = [
        f"Line: mean over {seed_range(counts)}"
        f"{'' if counts == {1} else '; band: from the lowest to the highest seed'}.",
        "Compile, evaluation and checkpoints are not in the time." if across == "seconds" else "",
        "The first steps are cut off above." if clipped else "",
        "Measured.",
    ]
    caption = " ".join(sentence for sentence in sentences if sentence)
    caption += left_out(len(have), len(have) - len(shown))
    if len(blocks) > MAX_PANELS:
        caption += f" Panels of {len(blocks) - MAX_PANELS} more baselines are left out."
    return Plot(f"loss_{versus}", title, caption, figure)


def _seeds(arm: Arm, key: str, across: str) -> list[Curve]:
    """Return the curve of each finished trial; a noisy training loss as its running median."""
    found = []
    for trial in arm.finished():
        points = curve(trial.curve, across, key)
        smooth = running_median([y for _, y in points]) if key == "loss" else None
        if smooth:
            points = [(x, y) for (x, _), y in zip(points, smooth, strict=True)]
        if points:
            found.append(points)
    return found


def _format_x(panels: Sequence[Axes], across: str) -> str:
    """Format tokens as 50M and time in a unit that suits all panels; return the axis title."""
    if across == "tokens":
        for axes in panels:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        return CURVE_TITLES[across]
    longest = max(axes.get_xlim()[1] for axes in panels)
    unit, size = next(((u, s) for u, s in (("h", 3600), ("min", 60)) if longest > 3 * s), ("s", 1))
    for axes in panels:
        axes.xaxis.set_major_locator(MultipleLocator(size * _tick_step(axes.get_xlim()[1] / size)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / size:g}"))
    return f"{CURVE_TITLES[across]} ({unit})"


def _tick_step(length: float) -> float:
    """Return a round step that gives four to eight ticks."""
    power = 10.0 ** math.floor(math.log10(length / 4))
    return max(power * part for part in (1, 2, 2.5, 5) if power * part <= length / 4)


def _panel(axes: Axes, arms: Sequence[tuple[str, list[Curve]]]) -> bool:
    """Draw the arms of one baseline, given as (name, curves). Return whether the view cuts off the beginning."""
    ends, bands, furthest = [], [], 0.0
    for (name, seeds), (dashes, marker, shade) in zip(arms, STYLES, strict=False):
        x, middle, low, high = _band(seeds)
        axes.plot(x, middle, color=shade, linestyle=dashes, linewidth=1.5, marker=marker, markersize=4.5,
                  markevery=max(1, len(x) // 6), markerfacecolor="white", label=name)  # fmt: skip
        if np.any(high > low):
            axes.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0)
        ends.append((float(x[-1]), float(middle[-1]), name, shade))
        bands.append((x, middle, low, high))
        furthest = max(furthest, float(x[-1]))
    axes.set_xlim(0, furthest * 1.02 or 1.0)
    bottom = min(float(low.min()) for _, _, low, _ in bands)
    top = max(float(np.interp(EARLY * furthest, x, middle)) for x, middle, _, _ in bands)
    clipped = max(float(high.max()) for *_, high in bands) > top > bottom
    if clipped:
        axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.04 * (top - bottom))
    _label_ends(axes, ends)
    return clipped


def _label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each curve's name to the right of the panel, as near to the height of its end as the others allow."""
    low, high = axes.get_ylim()
    step = 0.105 * (high - low)
    places: list[float] = []
    ordered = sorted(ends, key=lambda end: end[1])
    for _, y, _, _ in ordered:
        places.append(max(y, places[-1] + step if places else low + 0.4 * step))
    # Push labels back down if the stack reached above the panel.
    ceiling = high - 0.4 * step
    for index in reversed(range(len(places))):
        places[index] = min(places[index], ceiling)
        ceiling = places[index] - step
    for (x, y, name, shade), place in zip(ordered, places, strict=True):
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": shade, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(wrapped(name, 20, 2), (x, y), xytext=(1.04, place), textcoords=axes.get_yaxis_transform(),
                      fontsize=7.5, va="center", color=shade, annotation_clip=False, linespacing=0.9,
                      arrowprops=leader)  # fmt: skip


def _band(seeds: list[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (x, mean, lowest, highest) over the seeds, where all of them have values."""
    start = max(points[0][0] for points in seeds)
    stop = min(points[-1][0] for points in seeds)
    grid = np.array(sorted({x for points in seeds for x, _ in points if start <= x <= stop}) or [stop])
    lines = np.array([np.interp(grid, *np.array(points).T) for points in seeds])
    return grid, lines.mean(axis=0), lines.min(axis=0), lines.max(axis=0)
