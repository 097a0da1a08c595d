"""Draws a study's charts with plotly: bars, differences from the baseline, trade-offs, and loss curves.

Their data are those of the report (report/chart_data.py and report/curve_data.py).
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go

from deskside.dashboard.label_places import Line, Mark, label_offset, place_labels
from deskside.dashboard.plotly_charts import (
    BLUE,
    COLORS,
    DASHES,
    EDGE_COLOR,
    GREY,
    SKY,
    SYMBOLS,
    VERMILION,
    add_arrows,
    apply_layout,
    error_bars,
    rows_height,
    set_axis,
    translucent,
    unique_labels,
    wrap_label,
)
from deskside.report import study_text
from deskside.report.chart_data import (
    Axis,
    ChartRow,
    Interval,
    RowChart,
    ScatterChart,
    ScatterPoint,
    bar_chart,
    forest_chart,
    scatter_chart,
)
from deskside.report.curve_data import CURVE_TITLES, Curve, seed_band, y_range
from deskside.report.study_verdicts import is_better
from deskside.study.results import Arm, Factor, Front, Results
from deskside.study.stats.metrics import metric_named

NATIVE, EMULATED = "native", "emulated: speed and power are not those of native hardware"
ON_FRONT = "Pareto front"
# A forest plot's mark by the outcome of its comparison: (name in the legend, color, symbol).
OUTCOMES = {
    "better": ("shown to be better", BLUE, "circle"),
    "worse": ("shown to be worse", VERMILION, "diamond"),
    "different": ("difference shown", EDGE_COLOR, "square"),
    "open": ("no difference shown", GREY, "circle-open"),
    "one seed": ("one seed, no interval", GREY, "x-thin-open"),
}
VALUE_WIDTH = 76  # pixels of the column of values at the right of a bar chart
SCATTER_HEIGHT = 500  # pixels
# Pixels of the plot in it, without axes and legend: on a phone, and on a screen from WIDE_SCREEN on.
NARROW, WIDE = (265.0, 345.0), (700.0, 395.0)
WIDE_SCREEN = 1100
LABEL_COLUMNS = 24
CHARACTER_WIDTH, TEXT_HEIGHT = 6.4, 18.0  # pixels of a character of a label, on average, and of its line


def hover_text(results: Results, arm: Arm, key: str) -> str:
    """Return the text about an arm that appears when the pointer is over its mark."""
    metric = metric_named(key)
    lines = [
        wrap_label(arm.label, 60),
        f"{metric.heading}: {study_text.estimate_text(metric, arm.estimate(key))}",
        f"trials: {study_text.trials_text(arm)}",
        *(["emulated"] if arm.emulated else []),
    ]
    baseline = results.arm(arm.baseline)
    if baseline is not None and arm.comparison(key) is not None:
        lines.append(f"against {wrap_label(baseline.label, 60)}: {study_text.difference_text(arm, key)}")
    return "<br>".join(lines)


def bars(results: Results, key: str, limit: tuple[float, str] | None = None) -> go.Figure | None:
    """Draw a bar with an interval for each arm that has the metric. None if no arm has it.

    `limit` is the position (in display units) and label of a reference line.
    """
    data = bar_chart(results.arms, key, limit=limit)
    if data is None:
        return None
    rows = _rows_with_intervals(data)
    names = _row_labels(rows)
    figure = go.Figure()
    for emulated in (False, True):
        part = [(row, interval) for row, interval in rows if row.arm.emulated is emulated]
        if not part:
            continue
        hatch = {"shape": "/" if emulated else "", "fgcolor": EDGE_COLOR, "fillmode": "overlay", "size": 7}
        figure.add_bar(
            y=[names[row.arm.id] for row, _ in part],
            x=[interval.mean for _, interval in part],
            error_x=error_bars([interval for _, interval in part]),
            orientation="h",
            name=EMULATED if emulated else NATIVE,
            marker={
                "color": SKY if emulated else BLUE,
                "line": {"color": EDGE_COLOR, "width": 1},
                "pattern": hatch,
            },
            hovertext=[hover_text(results, row.arm, key) for row, _ in part],
            hoverinfo="text",
        )
    labels = [names[row.arm.id] for row, _ in rows]
    add_arrows(figure, [interval for _, interval in rows], labels)
    _add_values(figure, [(names[row.arm.id], row.text) for row, _ in rows])
    if data.limit is not None:
        position, name = data.limit
        annotation = {"text": name, "xanchor": "right"}
        figure.add_vline(x=position, line={"dash": "dash", "color": VERMILION}, annotation=annotation)
    legend = data.clipped or any(row.arm.emulated for row, _ in rows)
    apply_layout(figure, 110 + rows_height(labels), barmode="overlay", bargap=0.25, showlegend=legend)
    figure.update_layout(margin={"r": VALUE_WIDTH})
    set_axis(figure.update_xaxes, data.axis)
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=labels, autorange="reversed", showgrid=False
    )
    return figure


def _add_values(figure: go.Figure, values: Sequence[tuple[str, str]]) -> None:
    """Write the rows' values, given as (row, text), in a column at the right of the plot."""
    for row, text in values:
        figure.add_annotation(
            x=1, xref="paper", xanchor="right", xshift=VALUE_WIDTH - 6, y=row, text=text, showarrow=False
        )


def _rows_with_intervals(data: RowChart) -> list[tuple[ChartRow, Interval]]:
    return [(row, row.interval) for row in data.rows if row.interval is not None]


def _row_labels(rows: Sequence[tuple[ChartRow, Interval]]) -> dict[str, str]:
    """Return arm id -> unique wrapped label."""
    return {arm: wrap_label(label) for arm, label in unique_labels([row.arm for row, _ in rows]).items()}


def forest(results: Results, key: str) -> go.Figure | None:
    """Draw relative differences from each arm's baseline with their intervals. None if no arm was compared."""
    data = forest_chart(results, results.arms, key)
    if data is None:
        return None
    rows = _rows_with_intervals(data)
    names = _row_labels(rows)
    figure = go.Figure()
    figure.add_vline(x=0, line={"color": GREY, "width": 2})
    for outcome, (title, color, symbol) in OUTCOMES.items():
        part = [(row, interval) for row, interval in rows if _row_outcome(row, key) == outcome]
        if not part:
            continue
        labels = [names[row.arm.id] for row, _ in part]
        intervals = [interval for _, interval in part]
        figure.add_scatter(
            x=[interval.mean for interval in intervals],
            y=labels,
            error_x={**error_bars(intervals), "color": color},
            mode="markers",
            name=title,
            marker={"size": 12, "color": color, "symbol": symbol, "line": {"width": 2}},
            hovertext=[hover_text(results, row.arm, key) for row, _ in part],
            hoverinfo="text",
        )
        add_arrows(figure, intervals, labels)
    apply_layout(figure, 130 + rows_height(names.values()), showlegend=True)
    better = {"lower": "<br>left is better", "higher": "<br>right is better"}.get(data.axis.better or "", "")
    figure.update_xaxes(title=data.axis.title + better, range=list(data.axis.range))
    order = list(names.values())
    # Without a type, plotly would take a label such as "512, 1,024" for a number.
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=order, range=[len(rows) - 0.4, -0.6]
    )
    return figure


def _row_outcome(row: ChartRow, key: str) -> str:
    """Return the key of OUTCOMES for a row of a forest plot."""
    comparison = row.arm.comparison(key)
    assert comparison is not None
    better = is_better(comparison)
    if row.kind == "one seed":
        return "one seed"
    if better is None:
        return "open"
    if metric_named(key).better is None:
        return "different"
    return "better" if better else "worse"


def fronts_in(results: Results, first: str, second: str) -> list[Front]:
    """Return the Pareto fronts in exactly these two metrics or, if there are none, those in the most metrics."""
    exact = [front for front in results.fronts if set(front.metrics) == {first, second}]
    max_metrics = max((len(front.metrics) for front in results.fronts), default=0)
    return exact or [front for front in results.fronts if len(front.metrics) == max_metrics]


def trade_off(results: Results, x_key: str, y_key: str, factor: Factor | None = None) -> go.Figure | None:
    """Draw two metrics of each arm against each other. None if no arm has both.

    Colors and symbols stand for the levels of `factor`. Larger marks have more parameters, open ones are emulated, and
    a ring marks the Pareto front. Labels stand where they cover nothing; `narrow_screen_style` hides those for which a
    phone has no space.
    """
    data = scatter_chart(results.arms, x_key, y_key, fronts_in(results, x_key, y_key))
    if data is None:
        return None
    figure = go.Figure()
    _add_front(figure, data)
    for index, (level, points) in enumerate(_by_level(data, factor).items()):
        symbol = SYMBOLS[index % len(SYMBOLS)]
        figure.add_scatter(
            x=[point.x.mean for point in points],
            y=[point.y.mean for point in points],
            error_x=_thin(error_bars([point.x for point in points])),
            error_y=_thin(error_bars([point.y for point in points])),
            mode="markers",
            name=wrap_label(level, 40),
            marker={
                "size": [2 * _radius(point) for point in points],
                "color": COLORS[index % len(COLORS)],
                "symbol": [symbol + "-open" if point.arm.emulated else symbol for point in points],
                "line": {"width": [3 if point.arm.emulated else 1 for point in points]},
                "opacity": 0.9,
            },
            hovertext=[
                "<br>".join(hover_text(results, point.arm, key) for key in (x_key, y_key)) for point in points
            ],
            hoverinfo="text",
            showlegend=factor is not None,
        )
    add_arrows(figure, [point.x for point in data.points], [point.y.mean for point in data.points])
    add_arrows(
        figure, [point.y for point in data.points], [point.x.mean for point in data.points], vertical=True
    )
    _add_labels(figure, results, data)
    legend = factor is not None or any(point.on_front for point in data.points)
    apply_layout(figure, SCATTER_HEIGHT, showlegend=legend)
    figure.update_layout(legend={"title": {"text": factor.label if factor is not None else ""}})
    set_axis(figure.update_xaxes, data.x)
    set_axis(figure.update_yaxes, data.y)
    return figure


def _add_front(figure: go.Figure, data: ScatterChart) -> None:
    """Draw rings around the points of the Pareto front, and its line if it is a front in the metrics of the axes."""
    on_front = [point for point in data.points if point.on_front]
    if data.staircase:
        x, y = zip(*data.staircase, strict=True)
        shape = "hv" if data.x.better == "lower" else "vh"
        line = {"color": GREY, "dash": "dot", "width": 1.5, "shape": shape}
        figure.add_scatter(x=x, y=y, mode="lines", line=line, hoverinfo="skip", showlegend=False)
    if on_front:
        figure.add_scatter(
            x=[point.x.mean for point in on_front],
            y=[point.y.mean for point in on_front],
            mode="markers",
            name=ON_FRONT,
            marker={
                "size": [2 * _radius(point) + 9 for point in on_front],
                "symbol": "circle-open",
                "color": EDGE_COLOR,
                "line": {"width": 1.5},
            },
            hoverinfo="skip",
        )


def _radius(point: ScatterPoint) -> float:
    return 5 + 6 * point.size**0.5


def _thin(bars: dict[str, Any]) -> dict[str, Any]:
    return {**bars, "thickness": 1, "width": 3} if "color" in bars else bars


def _by_level(data: ScatterChart, factor: Factor | None) -> dict[str, list[ScatterPoint]]:
    """Return the points of each level of a factor, in the factor's order; all under one name without a factor."""
    if factor is None:
        return {"arms": data.points}
    levels = dict.fromkeys(
        [*factor.levels, *(p.arm.levels.get(factor.name, "not varied") for p in data.points)]
    )
    found = {
        level: [p for p in data.points if p.arm.levels.get(factor.name, "not varied") == level]
        for level in levels
    }
    return {level: points for level, points in found.items() if points}


def _add_labels(figure: go.Figure, results: Results, data: ScatterChart) -> None:
    """Label the points: first those of the front, as far as a phone has space, then others for wide screens."""
    several = len({point.arm.baseline for point in data.points}) > 1
    names = (
        unique_labels([point.arm for point in data.points])
        if several
        else study_text.short_labels(results, [point.arm for point in data.points])
    )
    names = _without_common_parts(names)
    texts = [
        textwrap.shorten(names[point.arm.id], LABEL_COLUMNS, placeholder=" \u2026") for point in data.points
    ]
    marks = [
        Mark(
            _share(point.x.mean, data.x),
            1 - _share(point.y.mean, data.y),
            _radius(point) + (3 if point.on_front else 0),
            CHARACTER_WIDTH * len(text),
            TEXT_HEIGHT,
        )
        for point, text in zip(data.points, texts, strict=True)
    ]
    order = sorted(range(len(marks)), key=lambda i: (not data.points[i].on_front, not _is_baseline(data, i)))
    front, (across, upright) = _front_lines(data), _interval_lines(data)
    sides: dict[int, tuple[int, int]] = {}
    # Rather a label on an upright interval than one that an interval strikes through, and rather that than none.
    kept_free = ([*front, *across, *upright], [*front, *across], front)
    for lines in kept_free:
        sides = place_labels(marks, order, (NARROW, WIDE), sides, lines)
    narrow = set(sides)
    for lines in kept_free:
        sides = place_labels(marks, order, (WIDE,), sides, lines)
    for index, side in sides.items():
        point = data.points[index]
        right, down = label_offset(marks[index], side)
        figure.add_annotation(
            x=log10(point.x.mean) if data.x.log else point.x.mean,
            y=log10(point.y.mean) if data.y.log else point.y.mean,
            text=wrap_label(texts[index], LABEL_COLUMNS),
            font={"size": 12},
            showarrow=False,
            xshift=right,
            yshift=-down,
            borderpad=0,
            name="" if index in narrow else "wide",
        )


def _without_common_parts(names: Mapping[str, str]) -> dict[str, str]:
    """Return the labels without the parts between commas that all have, such as "16 passes", which say nothing."""
    parts = {arm: name.split(", ") for arm, name in names.items()}
    common = set.intersection(*(set(of_arm) for of_arm in parts.values()))
    shorter = {arm: ", ".join(p for p in of_arm if p not in common) for arm, of_arm in parts.items()}
    return {arm: shorter[arm] or name for arm, name in names.items()} if len(names) > 1 else dict(names)


def _front_lines(data: ScatterChart) -> list[Line]:
    """Return the steps of the Pareto front's line, which `trade_off` draws, as fractions of the plot."""
    corners = [(_share(x, data.x), 1 - _share(y, data.y)) for x, y in data.staircase]
    lines: list[Line] = []
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        corner = (x1, y0) if data.x.better == "lower" else (x0, y1)
        lines += [((x0, y0), corner), (corner, (x1, y1))]
    return lines


def _interval_lines(data: ScatterChart) -> tuple[list[Line], list[Line]]:
    """Return the horizontal and the vertical intervals of all points as fractions of the plot."""
    across: list[Line] = []
    upright: list[Line] = []
    for point in data.points:
        x, y = _share(point.x.mean, data.x), 1 - _share(point.y.mean, data.y)
        x_ends = [_share(max(end, data.x.range[0]), data.x) for end in (point.x.low, point.x.high)]
        y_ends = [1 - _share(max(end, data.y.range[0]), data.y) for end in (point.y.low, point.y.high)]
        across.append(((x_ends[0], y), (x_ends[1], y)))
        upright.append(((x, y_ends[0]), (x, y_ends[1])))
    return across, upright


def _is_baseline(data: ScatterChart, index: int) -> bool:
    return data.points[index].arm.id == data.points[index].arm.baseline


def _share(value: float, axis: Axis) -> float:
    """Return the position of a value on an axis, 0 at its start and 1 at its end."""
    start, stop = axis.range
    if axis.log:
        start, stop, value = log10(start), log10(stop), log10(value)
    return (value - start) / (stop - start)


def narrow_screen_style(figure: go.Figure, key: str) -> str:
    """Return a style sheet that hides the labels for which a narrow screen has no space.

    `key` is that of the container in which the chart stands.
    """
    indices = [index for index, note in enumerate(figure.layout.annotations) if note.name == "wide"]
    if not indices:
        return ""
    selectors = ",".join(f'.st-key-{key} .annotation[data-index="{index}"]' for index in indices)
    return f"<style>@media (max-width: {WIDE_SCREEN}px) {{{selectors} {{display: none}}}}</style>"


def curves(arm_curves: Mapping[str, Sequence[Curve]], x_key: str, y_key: str) -> go.Figure | None:
    """Draw loss against time or tokens: a line for the mean of each arm, and a band from its lowest to highest seed.

    `arm_curves` maps an arm's label to the curves of its trials. Returns None if no trial has points.
    """
    drawn = {label: seed_band(trials) for label, trials in arm_curves.items() if trials}
    if not drawn:
        return None
    figure = go.Figure()
    for index, (label, band) in enumerate(drawn.items()):
        color, x = COLORS[index % len(COLORS)], list(band.x)
        if band.seeds > 1:
            figure.add_scatter(
                x=[*x, *reversed(x)],
                y=[*band.high, *reversed(band.low)],
                fill="toself",
                fillcolor=translucent(color),
                line={"width": 0},
                mode="lines",
                legendgroup=label,
                showlegend=False,
                hoverinfo="skip",
            )
        figure.add_scatter(
            x=x,
            y=list(band.mean),
            mode="lines+markers" if len(x) <= 60 else "lines",
            name=wrap_label(label, 60),
            legendgroup=label,
            line={"color": color, "dash": DASHES[index % len(DASHES)], "width": 2},
            marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 6},
            hovertemplate=f"%{{y:.4f}}<extra>{wrap_label(label, 60)}</extra>",
        )
    apply_layout(figure, 400 + 22 * len(drawn), showlegend=len(drawn) > 1)
    figure.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top"}, margin={"t": 44})
    figure.update_xaxes(title=CURVE_TITLES[x_key] + (", s" if x_key == "seconds" else ""), rangemode="tozero")
    view = y_range(list(drawn.values()))
    figure.update_yaxes(title=CURVE_TITLES[y_key], range=None if view is None else list(view))
    return figure
