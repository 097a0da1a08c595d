"""Draws loss curves of a study: each arm's mean over seeds, with a band from the lowest to the highest seed."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

from deskside.report.canvas import (
    Plot,
    new_figure,
    one_line,
    style_axes,
    wrapped,
)
from deskside.report.chart_data import most_different
from deskside.report.charts import left_out_note
from deskside.report.colors import BLUE, GREEN, GREY, INK, PAPER, PURPLE, VERMILION
from deskside.report.curve_data import CURVE_TITLES, Curve, finished_curves, loss_key, seed_band, y_range
from deskside.report.study_text import by_baseline, seed_range, short_labels
from deskside.study.metrics import QUALITY
from deskside.study.results import Group, Results

MAX_PANELS, MAX_CURVES = 4, 6
STYLES: tuple[tuple[Any, str, str], ...] = (  # dashes, marker, shade
    ("-", "o", INK),
    ((0, (6, 2)), "s", BLUE),
    ((0, (2, 1.5)), "^", VERMILION),
    ((0, (7, 2, 1.5, 2)), "D", GREEN),
    ((0, (1, 1.5)), "v", PURPLE),
    ((0, (4, 1.5, 1, 1.5, 1, 1.5)), "P", GREY),
)


def draw_curves(results: Results, group: Group, x_key: str) -> Plot | str:
    """Draw loss against `x_key` ("tokens" or "seconds"), with one panel for each baseline and its arms.

    The loss is validation bits per byte if every evaluated trial has at least three points, else the training loss.
    """
    versus = "time" if x_key == "seconds" else x_key
    arms = [arm for arm in results.arms_in(group) if arm.finished()]
    y_key = loss_key(arms, x_key)
    curves_of = {arm.id: finished_curves(arm, y_key, x_key) for arm in arms}
    plotted = [arm for arm in arms if curves_of[arm.id]]
    if not plotted:
        return f"No curves of loss against {versus}: no finished trial has a curve."
    baseline_groups = by_baseline(plotted)
    shown_groups = baseline_groups[:MAX_PANELS]
    name, unit = CURVE_TITLES[y_key].split(", ")
    title = f"{name.capitalize()} against {versus}"
    figure, unused = new_figure(title, 0.5 + 2.75 * len(shown_groups))
    figure.delaxes(unused)
    panels: list[Axes] = list(figure.subplots(len(shown_groups), 1, squeeze=False)[:, 0])
    names, shown = short_labels(results, plotted), []
    clipped = False
    for axes, (baseline, members) in zip(panels, shown_groups, strict=True):
        style_axes(axes)
        chosen = most_different(members, QUALITY, MAX_CURVES)
        shown += chosen
        clipped |= _draw_panel(axes, [(names[arm.id], curves_of[arm.id]) for arm in chosen])
        if len(baseline_groups) > 1:
            baseline_arm = results.arm(baseline)
            axes.set_title(
                one_line(baseline_arm.label if baseline_arm else baseline, 60), loc="left", fontsize=10.5
            )
        axes.set_ylabel(f"{name}\n({unit})", fontsize=10)
    panels[-1].set_xlabel(_format_x(panels, x_key), fontsize=10.5)
    counts = {len(curves_of[arm.id]) for arm in shown}
    sentences = [
        f"Line: mean over {seed_range(counts)}"
        f"{'' if counts == {1} else '; band: from the lowest to the highest seed'}.",
        "Compile, evaluation and checkpoints are not in the time." if x_key == "seconds" else "",
        "The first steps are cut off above." if clipped else "",
        "All values are measured.",
    ]
    caption = " ".join(sentence for sentence in sentences if sentence)
    caption += left_out_note(len(plotted), len(plotted) - len(shown))
    if len(baseline_groups) > MAX_PANELS:
        caption += f" Panels of {len(baseline_groups) - MAX_PANELS} more baselines are left out."
    return Plot(f"loss_{versus}", title, caption, figure)


def _format_x(panels: Sequence[Axes], x_key: str) -> str:
    """Format the ticks: tokens like 50M, time in a unit that suits all panels. Return the axis title."""
    if x_key == "tokens":
        for axes in panels:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        return CURVE_TITLES[x_key]
    longest_seconds = max(axes.get_xlim()[1] for axes in panels)
    unit, unit_seconds = "s", 1
    for name, seconds in (("min", 60), ("h", 3600)):
        if longest_seconds > 3 * seconds:
            unit, unit_seconds = name, seconds
    for axes in panels:
        axes.xaxis.set_major_locator(
            MultipleLocator(unit_seconds * _tick_step(axes.get_xlim()[1] / unit_seconds))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / unit_seconds:g}"))
    return f"{CURVE_TITLES[x_key]} ({unit})"


def _tick_step(length: float) -> float:
    """Return a round step that divides `length` into four to eight parts."""
    power = 10.0 ** math.floor(math.log10(length / 4))
    return max(power * part for part in (1, 2, 2.5, 5) if power * part <= length / 4)


def _draw_panel(axes: Axes, arms: Sequence[tuple[str, list[Curve]]]) -> bool:
    """Draw the arms of one baseline, given as (name, curves). Return True if the view cuts off the first steps."""
    ends, bands = [], []
    for (name, curves), (dashes, marker, shade) in zip(arms, STYLES, strict=False):
        band = seed_band(curves)
        x, mean = band.x, band.mean
        axes.plot(x, mean, color=shade, linestyle=dashes, linewidth=1.5, marker=marker, markersize=4.5,
                  markevery=max(1, len(x) // 6), markerfacecolor=PAPER, label=name)  # fmt: skip
        if np.any(band.high > band.low):
            axes.fill_between(x, band.low, band.high, color=shade, alpha=0.15, linewidth=0)
        ends.append((float(x[-1]), float(mean[-1]), name, shade))
        bands.append(band)
    axes.set_xlim(0, max(x for x, *_ in ends) * 1.02 or 1.0)
    view = y_range(bands)
    if view is not None:
        axes.set_ylim(*view)
    _label_ends(axes, ends)
    return view is not None


def _label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write the curves' names to the right of the panel, near the curves' ends, without overlap.

    `ends` are (x, y, name, color).
    """
    low, high = axes.get_ylim()
    spacing = 0.105 * (high - low)
    heights: list[float] = []
    ordered = sorted(ends, key=lambda end: end[1])
    for _, y, _, _ in ordered:
        heights.append(max(y, heights[-1] + spacing if heights else low + 0.4 * spacing))
    # Push labels back down if the stack reached above the panel.
    ceiling = high - 0.4 * spacing
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], ceiling)
        ceiling = heights[index] - spacing
    for (x, y, name, shade), height in zip(ordered, heights, strict=True):
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": shade, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(wrapped(name, 20, 2), (x, y), xytext=(1.04, height), textcoords=axes.get_yaxis_transform(),
                      fontsize=9.5, va="center", color=shade, annotation_clip=False, linespacing=0.9,
                      arrowprops=leader)  # fmt: skip
