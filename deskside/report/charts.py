"""Draws a study's bars, forest plots, bubbles, Pareto fronts and heat maps with matplotlib.

A heat map shows relative differences: one factor against the other if two are crossed, else arms against metrics.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
    StrMethodFormatter,
)

from deskside.report.canvas import HATCH, STRONGEST, Plot, new_figure, one_line, row_inches, wrapped
from deskside.report.chart_data import (
    CLIPPED,
    Axis,
    ChartRow,
    Interval,
    RowChart,
    ScatterChart,
    bar_chart,
    forest_chart,
    front_axes,
    most_different,
    scatter_chart,
    symmetric_log_ticks,
)
from deskside.report.colors import BETTER, GREY, INK, PALE, PAPER, WORSE
from deskside.report.study_text import reason_missing, seed_range, seeds_text, short_labels
from deskside.run.record import number
from deskside.study.metrics import ENERGY, MEMORY, PRIMARY, QUALITY, SPEED, metric_named
from deskside.study.results import Arm, Factor, Front, Group, Results
from deskside.utils.format import percent, percent_digits

MAX_ROWS = 40
MAX_POINTS = 24  # arms in a plot where each is marked by a number
MIN_AREA, MAX_AREA = 40.0, 700.0  # of bubbles, in square points
HEAT_LEGEND = (
    "Blue: better; orange: worse; a stronger color: a larger difference. In brackets: no difference shown, or too few "
    "seeds to say. All values are measured."
)
Cell = tuple[float | None, str]  # (how much worse than the baseline, None if unknown; text)


def left_out_note(total: int, hidden: int, rows: str = "arms") -> str:
    """Return a sentence for the caption if rows are left out of a plot, else the empty string."""
    if not hidden:
        return ""
    return f" {hidden} of {total} {rows} are left out here (those that differ least); the table lists all of them."


def row_names(results: Results, arms: Sequence[Arm], emulated: Sequence[bool]) -> list[str]:
    """Return a wrapped row label for each arm, shortened if all arms have the same baseline."""
    names = {arm.id: arm.label for arm in arms}
    if len({arm.baseline for arm in arms}) == 1:
        names = short_labels(results, arms)
    return [
        wrapped(names[arm.id] + (" (emulated)" if is_emulated else ""), columns=26, max_lines=2)
        for arm, is_emulated in zip(arms, emulated, strict=True)
    ]


def draw_bars(results: Results, group: Group, key: str) -> Plot | str:
    """Draw one metric of every arm as bars with intervals, or return why there is nothing to draw."""
    data = bar_chart(results.arms_in(group), key, MAX_ROWS)
    if data is None:
        return f"No bar chart of {metric_named(key).label}: it was not measured in any arm."
    metric, rows = data.metric, data.rows
    names = row_names(results, [row.arm for row in rows], [row.emulated for row in rows])
    figure, axes = new_figure(metric.label.capitalize(), 0.95 + row_inches(names) * max(len(rows), 2))
    for y, row in enumerate(rows):
        # The values are in one column next to the plot, so that no interval covers them.
        axes.text(1.02, y, row.text, transform=axes.get_yaxis_transform(), fontsize=10, va="center",
                  color=GREY if row.interval is None else INK)  # fmt: skip
        if row.interval is None:
            continue
        interval = row.interval
        error: dict[str, Any] = {}
        if interval.low < interval.mean or interval.high > interval.mean:
            lengths = [[interval.mean - interval.low], [interval.high - interval.mean]]
            error = {"xerr": lengths, "ecolor": INK}
        face = PAPER if row.emulated else GREY if row.is_baseline else PALE
        axes.barh(y, interval.mean, height=0.68, color=face, edgecolor=INK, linewidth=0.8,
                  hatch=HATCH if row.emulated else None, **error)  # fmt: skip
        _draw_arrows(axes, interval, y)
    axes.set_yticks(range(len(rows)), names, fontsize=10)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(*data.axis.range)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"{metric.label} ({metric.unit})", fontsize=10.5)
    if key == SPEED:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    hatched = " Hatched: the number format is emulated" if any(row.emulated for row in rows) else ""
    if hatched:
        hatched += ", so this is not the speed of hardware with it." if key == SPEED else "."
    caption = (
        f"{metric.heading[0].upper()}{metric.heading[1:]}{f' ({metric.about})' if metric.about else ''}: mean and "
        f"interval over seeds ({seeds_text([row.arm for row in rows], key)}). Bars with more contrast: baselines."
        f"{hatched}{_clipped_note(data)} All values are measured."
    )
    caption += left_out_note(data.total, data.hidden)
    return Plot(f"bars_{key}", f"Bars: {metric.label}", caption, figure)


def draw_forest(
    results: Results, arms: Sequence[Arm], key: str, title: str = "", rows: str = "arms"
) -> Plot | str:
    """Draw relative differences from the baselines with their intervals, or return why there is nothing to draw.

    The arms may be those of several groups, which are then stacked. rows: what the caption calls them.
    """
    data = forest_chart(results, arms, key, MAX_ROWS)
    metric = metric_named(key)
    if data is None:
        return f"No forest plot of {metric.label}: no arm could be compared with its baseline."
    short_names = short_labels(results, [row.arm for row in data.rows])
    names = [
        wrapped(short_names[row.arm.id] + (" (emulated)" if row.emulated else ""), columns=26, max_lines=2)
        for row in data.rows
    ]
    num_rows = len(data.rows) + len({row.heading for row in data.rows} - {""})
    title = title or f"{metric.label.capitalize()} against the baseline"
    headings = {row.heading: wrapped(row.heading, columns=60, max_lines=2) for row in data.rows}
    figure, axes = new_figure(title, 1.05 + row_inches([*names, *headings.values()]) * max(num_rows, 2))
    if data.linear_threshold is not None:
        axes.set_xscale("symlog", linthresh=data.linear_threshold, linscale=1.0)
        axes.set_xticks(symmetric_log_ticks(data.linear_threshold, data.axis.range[1]))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+g}" if abs(x) > 1e-9 else "0"))
    axes.set_xlim(*data.axis.range)
    ys, y, heading = [], 0, ""
    for row in data.rows:
        if row.heading != heading:
            heading = row.heading
            # It begins at the left edge of the figure, above the names of the arms.
            axes.annotate(headings[heading], (0.02, y), xycoords=(figure.transFigure, axes.transData),
                          fontsize=10, fontweight="bold", va="center", annotation_clip=False,
                          bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})  # fmt: skip
            y += 1
        color = GREY if row.interval is None else INK
        axes.text(
            1.02, y, row.text, transform=axes.get_yaxis_transform(), fontsize=10, va="center", color=color
        )
        if row.interval is not None:
            _draw_difference(axes, row.interval, y, row.kind, _difference_color(row, metric.better))
        ys.append(y)
        y += 1
    axes.axvline(0, color=INK, linewidth=1.0)
    axes.set_yticks(ys, names, fontsize=10)
    axes.set_ylim(y - 0.4, -0.6)
    left, right = {"lower": ("better", "worse"), "higher": ("worse", "better")}.get(
        metric.better or "", ("less", "more")
    )
    axes.set_xlabel(f"\u2190 {left}\u2003{data.axis.title}\u2003{right} \u2192", fontsize=10)
    compared = [c.n for row in data.rows if row.interval and (c := row.arm.comparison(key))]
    caption = (
        f"Relative difference, paired by seed ({seed_range(compared)}), with its interval. Blue: shown to be better; "
        "orange: shown to be worse; hollow: no difference shown; cross: one seed, no interval; square: exact."
        f"{_clipped_note(data)} All values are measured."
    )
    caption += left_out_note(data.total, data.hidden, rows)
    return Plot(f"forest_{key}", f"Forest plot: {metric.label}", caption, figure)


def _difference_color(row: ChartRow, better: str | None) -> str:
    if row.interval is None or row.kind not in ("shown", "exact") or better is None or row.interval.mean == 0:
        return GREY
    return BETTER if (row.interval.mean > 0) == (better == "higher") else WORSE


def _draw_difference(axes: Axes, interval: Interval, y: int, kind: str, color: str) -> None:
    if kind in ("shown", "not shown"):
        axes.plot([interval.low, interval.high], [y, y], color=color, linewidth=1.6, label="interval")
        for end, clipped in ((interval.low, interval.clipped_low), (interval.high, interval.clipped_high)):
            if not clipped:
                axes.plot([end], [y], marker="|", markersize=6, color=color)
        _draw_arrows(axes, interval, y)
    axes.plot([interval.mean], [y], marker={"one seed": "x", "exact": "s"}.get(kind, "o"), markersize=6, color=color,
              label="difference", markerfacecolor=PAPER if kind == "not shown" else color, markeredgewidth=1.4,
              linestyle="", zorder=4)  # fmt: skip


def _draw_arrows(axes: Axes, interval: Interval, position: float, vertical: bool = False) -> None:
    """Mark the ends where an interval continues beyond the axis. `position` is its place on the other axis."""
    markers = "v^" if vertical else "<>"
    for clipped, end, marker in (
        (interval.clipped_low, interval.low, markers[0]),
        (interval.clipped_high, interval.high, markers[1]),
    ):
        if clipped:
            x, y = (position, end) if vertical else (end, position)
            axes.plot([x], [y], marker=marker, markersize=5, color=INK, clip_on=False, zorder=4)


def draw_bubbles(results: Results, group: Group) -> Plot | str:
    """Draw peak memory (x) and speed (y), with areas in proportion to the parameters."""
    arms = results.arms_in(group)
    data = scatter_chart(arms, MEMORY, SPEED, max_arms=MAX_POINTS)
    sizes = [size.mean for arm in arms if (size := arm.estimate("parameters")) is not None]
    if data is None or not sizes:
        return "No bubble plot: no arm has speed, memory and parameters."
    figure, axes = _numbered_figure("Memory, speed and size", data)
    for point in data.points:
        area = max(MIN_AREA, MAX_AREA * min(1.0, 10 / len(data.points)) * point.size)
        axes.scatter([point.x.mean], [point.y.mean], s=area, facecolor=PAPER if point.arm.emulated else PALE,
                     edgecolor=INK, alpha=0.85, hatch=HATCH if point.arm.emulated else None, linewidth=0.8,
                     zorder=2)  # fmt: skip
    _finish_scatter(axes, data)
    shown = [point.arm for point in data.points]
    metric = metric_named("parameters")
    low, high = metric.text(min(sizes)), metric.text(max(sizes))
    emulated = any(arm.emulated for arm in shown)
    caption = (
        f"Area: parameters ({low if low == high else f'{low} to {high}'} M; very small ones are drawn larger). "
        f"Crosses: intervals over seeds ({seeds_text(shown, SPEED)}).{_clipped_note(data)}"
        f"{' Hatched: emulated, so this is not the speed of hardware with the format.' if emulated else ''}"
        " All values are measured."
    )
    caption += left_out_note(data.total, data.hidden)
    return Plot("bubbles", "Memory, speed and parameters", caption, figure)


def draw_front(results: Results, group: Group, front: Front) -> Plot | str:
    """Draw a Pareto front on two of its metrics: speed and validation loss if it has them."""
    arms = results.arms_in(group)
    x_key, y_key = front_axes(front)
    names = " x ".join(metric_named(key).label for key in front.metrics)
    data = scatter_chart(arms, x_key, y_key, [front], max_arms=MAX_POINTS)
    if data is None:
        return f"No Pareto front of {names}: no arm has these numbers."
    figure, axes = _numbered_figure(f"Pareto front: {names}", data)
    for point in data.points:
        marker, size, face = "o", 6, PAPER
        if point.on_front:
            marker, size, face = "s", 7, INK
        elif point.unclear:
            marker, size, face = "D", 6, PALE
        axes.plot([point.x.mean], [point.y.mean], marker=marker, markersize=size, color=INK, markerfacecolor=face,
                  linestyle="")  # fmt: skip
    if data.staircase:
        step_position: Any = "pre" if data.x.better == "higher" else "post"
        x, y = zip(*data.staircase, strict=True)
        axes.step(x, y, where=step_position, color=INK, linewidth=1.2, linestyle="--", zorder=1)
    _finish_scatter(axes, data)
    other_metrics = " and ".join(
        metric_named(key).label for key in front.metrics if key not in (x_key, y_key)
    )
    emulated = SPEED in front.metrics and any(point.arm.emulated for point in data.points)
    caption = (
        f"Filled squares: no other arm is as good in all of {names.replace(' x ', ', ')} and better in one."
        f"{f' The front also weighs {other_metrics}, which is not drawn.' if other_metrics else ''}"
        f"{' Gray diamonds: the intervals leave open whether they are on it.' if front.unclear else ''}"
        f" Crosses: intervals over seeds ({seeds_text([p.arm for p in data.points], x_key)}).{_clipped_note(data)}"
        f"{' Arms marked emulated do not have the speed of hardware with the format.' if emulated else ''}"
        " All values are measured."
    )
    caption += left_out_note(data.total, data.hidden)
    return Plot(f"pareto_{'_'.join(front.metrics)}", f"Pareto front: {names}", caption, figure)


def _clipped_note(data: RowChart | ScatterChart) -> str:
    return f" {CLIPPED}" if data.clipped else ""


def _numbered_figure(title: str, data: ScatterChart) -> tuple[Figure, Axes]:
    """Return a figure with a legend of the numbered arms below the plot, in two columns."""
    lines = [
        f"{point.number}  {one_line(point.arm.label, 26)}{' (emulated)' if point.arm.emulated else ''}"
        for point in data.points
    ]
    rows = (len(lines) + 1) // 2
    legend_inches = 0.2 * rows + 0.15  # height of a line of text, and the space around the legend
    height = 3.5 + legend_inches
    figure, axes = new_figure(title, height)
    figure.set_layout_engine("constrained", rect=(0, legend_inches / height, 1, 1 - legend_inches / height))
    for column, part in enumerate((lines[:rows], lines[rows:])):
        figure.text(0.02 + 0.5 * column, (legend_inches - 0.05) / height, "\n".join(part), va="top", fontsize=9.5,
                    linespacing=1.45)  # fmt: skip
    return figure, axes


def _finish_scatter(axes: Axes, data: ScatterChart) -> None:
    """Draw the axes, and the intervals and number of each arm."""
    for axis, name in ((data.x, "x"), (data.y, "y")):
        _set_axis(axes, axis, name)
    for point in data.points:
        x, y = point.x, point.y
        for vertical, interval in ((False, x), (True, y)):
            lengths = [[interval.mean - interval.low], [interval.high - interval.mean]]
            if any(length[0] > 0 for length in lengths):
                error: dict[str, Any] = {"yerr" if vertical else "xerr": lengths}
                axes.errorbar([x.mean], [y.mean], **error, color=INK, linewidth=0.9, capsize=2, fmt="none",
                              zorder=3)  # fmt: skip
        _draw_arrows(axes, x, y.mean)
        _draw_arrows(axes, y, x.mean, vertical=True)
    _place_numbers(axes, data)


def _set_axis(axes: Axes, axis: Axis, name: str) -> None:
    ticks = axes.xaxis if name == "x" else axes.yaxis
    if axis.log:
        axes.set(**{f"{name}scale": "log"})
        ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ticks.set_minor_formatter(NullFormatter())
    large = axis.range[1] >= 10_000
    ticks.set_major_formatter(EngFormatter(sep="") if large else StrMethodFormatter("{x:g}"))
    axes.set(**{f"{name}lim": axis.range})
    columns, lines = (56, 1) if name == "x" else (30, 2)
    ticks.set_label_text(wrapped(axis.title, columns, lines), fontsize=10.5)


def _place_numbers(axes: Axes, data: ScatterChart) -> None:
    """Write each arm's number next to its mark, at the offset that overlaps the fewest other numbers and marks."""
    axes.figure.canvas.draw()  # positions in pixels are known only after the layout
    scale = axes.figure.dpi / 72  # pixels per point
    positions = [axes.transData.transform((point.x.mean, point.y.mean)) for point in data.points]
    taken: list[tuple[float, float]] = [(position[0], position[1]) for position in positions]
    directions = ((1, 0.6), (-1, 0.6), (1, -0.6), (-1, -0.6), (0, 1), (0, -1))
    shifts = [(dx * distance, dy * distance) for distance in (11, 19, 27) for dx, dy in directions]
    for point, position in zip(data.points, positions, strict=True):

        def overlaps(shift: tuple[float, float], position: Any = position) -> int:
            x, y = position[0] + shift[0] * scale, position[1] + shift[1] * scale
            return sum(abs(x - x2) < 11 * scale and abs(y - y2) < 9 * scale for x2, y2 in taken)

        shift = min(shifts, key=overlaps)
        taken.append((position[0] + shift[0] * scale, position[1] + shift[1] * scale))
        leader = {"arrowstyle": "-", "linewidth": 0.4, "color": GREY, "shrinkA": 4, "shrinkB": 0}
        axes.annotate(str(point.number), (point.x.mean, point.y.mean), xytext=shift,
                      textcoords="offset points", ha="center", va="center", fontsize=10, fontweight="bold", zorder=5,
                      arrowprops=leader, path_effects=[withStroke(linewidth=2, foreground=PAPER)])  # fmt: skip


def draw_heat_maps(results: Results, group: Group) -> list[Plot | str]:
    """Draw the heat maps of a group, or return the reason why there is none."""
    arms = results.arms_in(group)
    factors = [factor for factor in group.factors if len({arm.levels.get(factor.name) for arm in arms}) > 1]
    keys = [
        key for key in (*PRIMARY, ENERGY) if any(_relative_difference(arm, key) is not None for arm in arms)
    ]
    if not set(keys) & set(PRIMARY):
        return ["No heat map: no arm could be compared with its baseline."]
    if len(factors) == 2 and group.design == "full":
        # A factor with a separate baseline for each level becomes the columns.
        rows, columns = sorted(factors, key=lambda factor: factor.name in group.within)
        return [_draw_two_factors(arms, rows, columns, key) for key in keys if key in PRIMARY]
    return [_draw_by_metric(results, arms, keys)]


def _draw_two_factors(arms: Sequence[Arm], rows: Factor, columns: Factor, key: str) -> Plot:
    # If two arms have the same levels, the first one is shown.
    arm_at = {(arm.levels.get(rows.name), arm.levels.get(columns.name)): arm for arm in reversed(arms)}

    def cell(row_level: str, column_level: str) -> Cell:
        arm = arm_at.get((row_level, column_level))
        if arm is None:
            return None, "no arm"
        amount, text = _cell(arm, key)
        return amount, f"{text} emulated" if key == SPEED and amount is not None and arm.emulated else text

    metric = metric_named(key)
    cells = [[cell(row_level, column_level) for column_level in columns.levels] for row_level in rows.levels]
    names = [wrapped(level, columns=26, max_lines=2) for level in rows.levels]
    title = f"{metric.label.capitalize()} against the baseline"
    figure = _draw_shaded_table(title, cells, names, columns.levels, scale_columns=False)
    caption = f"Difference in {metric.label} against each arm's baseline, in %. {HEAT_LEGEND}"
    directions = one_line(f"down: {rows.label}; across: {columns.label}", 75)
    figure.axes[0].set_title(directions, loc="left", fontsize=10)
    return Plot(f"heat_{key}", f"Heat map: {metric.label}", caption, figure)


def _draw_by_metric(results: Results, arms: Sequence[Arm], keys: Sequence[str]) -> Plot:
    compared = [arm for arm in arms if arm.id != arm.baseline]
    shown = most_different(compared, QUALITY, MAX_ROWS)
    cells = [[_cell(arm, key) for key in keys] for arm in shown]
    names = row_names(results, shown, [arm.emulated for arm in shown])
    heads = [f"{metric_named(key).label} ({metric_named(key).better} is better)" for key in keys]
    figure = _draw_shaded_table("Arms against their baselines", cells, names, heads, scale_columns=True)
    caption = f"Differences against each arm's baseline, in %, each column with its own shades. {HEAT_LEGEND}"
    return Plot(
        "heat", "Heat map", caption + left_out_note(len(compared), len(compared) - len(shown)), figure
    )


def _relative_difference(arm: Arm, key: str) -> float | None:
    comparison = arm.comparison(key)
    return None if comparison is None else number(comparison.relative)


def _cell(arm: Arm, key: str) -> Cell:
    """Return the cell of an arm in a heat map; the text is in brackets if no difference is shown."""
    if arm.id == arm.baseline:
        return (0.0, "baseline") if key in arm.estimates else (None, reason_missing(arm))
    comparison, relative = arm.comparison(key), _relative_difference(arm, key)
    if comparison is None or relative is None:
        return None, reason_missing(arm)
    text = percent(relative, percent_digits(relative), signed=True)
    decided = comparison.verdict in ("lower", "higher", "exact")
    how_much_worse = -relative if metric_named(key).better == "higher" else relative
    return how_much_worse, text if decided else f"({text})"


def _draw_shaded_table(
    title: str, cells: list[list[Cell]], rows: list[str], columns: list[str], scale_columns: bool
) -> Figure:
    """Draw a table with cells shaded by amount, relative to the whole table or, with `scale_columns`, to the column."""
    wide = len(columns) > 5
    figure, axes = new_figure(title, 1.1 + 0.38 * max(len(rows), 2) + (0.5 if wide else 0.0))
    amounts = np.array([[np.nan if amount is None else amount for amount, _ in row] for row in cells])
    largest = np.nanmax(np.abs(amounts), axis=0 if scale_columns else None, initial=0.0)
    shades = np.divide(amounts, largest, out=np.zeros_like(amounts), where=largest > 0)
    for y, row in enumerate(cells):
        for x, (amount, text) in enumerate(row):
            if amount:
                color = WORSE if amount > 0 else BETTER
                axes.add_patch(Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, color=color, linewidth=0,
                                         alpha=STRONGEST * abs(float(shades[y][x]))))  # fmt: skip
            axes.text(x, y, wrapped(text, 14, 2), linespacing=0.95, ha="center", va="center", fontsize=10,
                      color=GREY if amount is None else INK)  # fmt: skip
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=10)
    label_rotation: dict[str, Any] = (
        {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if wide else {}
    )
    axes.set_xticks(
        range(len(columns)),
        [wrapped(head, columns=15, max_lines=3) for head in columns],
        fontsize=10,
        **label_rotation,
    )
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure
