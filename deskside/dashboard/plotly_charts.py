"""Draws the chart data of `report/chart_data.py`, and the charts that only the dashboard has, with plotly.

Charts are readable in black and white and with any color vision: emulated bars are hatched, lines differ by dashes and
markers, and an open mark means that the verdict is "no difference shown", or that there is only one seed. Colors are
those of Okabe and Ito (2008).
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go

from deskside.dashboard.runs import Prediction
from deskside.report import study_text
from deskside.report.chart_data import (
    Axis,
    ChartRow,
    Interval,
    RowChart,
    bar_chart,
    forest_chart,
    scatter_chart,
    to_interval,
)
from deskside.report.curve_data import CURVE_TITLES, curve
from deskside.study.results import Arm, Estimate, Front, Results
from deskside.study.stats.metrics import metric_named

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7f7f7f",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY)
EDGE_COLOR, TEXT_COLOR = "#333333", "#57606a"
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
MAX_TEXT_COLUMNS = 16  # cells of a heat map have their number if there are at most so many columns
ROW_HEIGHT, LINE_HEIGHT = 30, 15  # in pixels: a row of a chart, and a line of its label
MODE_BAR: dict[str, Any] = {
    "displaylogo": False,
    "displayModeBar": True,
    "modeBarButtons": [["toImage", "zoom2d", "resetScale2d"]],
}
NATIVE, EMULATED = "native", "emulated: speed and power are not those of native hardware"
CLIPPED = "interval continues"


def apply_layout(figure: go.Figure, height: int, **options: Any) -> go.Figure:
    """Apply the common layout: no wasted margin on a phone, legend above the plot, grid on both axes."""
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 44, "b": 8},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        font={"size": 13, "color": TEXT_COLOR},
        modebar={"orientation": "h", "bgcolor": "rgba(0,0,0,0)", "color": TEXT_COLOR, "activecolor": BLUE},
        dragmode=False,
        uirevision="kept",  # a chart that is drawn again keeps the part that the user zoomed to
        **options,
    )
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(automargin=True, showline=True, gridcolor="rgba(127,127,127,0.3)", zeroline=False)
        update(linecolor=TEXT_COLOR, tickfont={"color": TEXT_COLOR}, title_font={"color": TEXT_COLOR})
    return figure


def wrap_label(text: str, width: int = 28) -> str:
    """Return a label wrapped at `width` columns for plotly, with HTML escaped."""
    lines = textwrap.wrap(text, width) or [""]
    return "<br>".join(line.replace("&", "&amp;").replace("<", "&lt;") for line in lines)


def unique_labels(arms: Sequence[Arm]) -> dict[str, str]:
    """Return arm id -> label. Arms with equal labels get their ids instead."""
    labels = [arm.label for arm in arms]
    return {arm.id: arm.label if labels.count(arm.label) == 1 else arm.id for arm in arms}


def rows_height(labels: Collection[str]) -> int:
    """Return the height in pixels of rows with these wrapped labels; all rows are as high as the highest."""
    lines = max((label.count("<br>") + 1 for label in labels), default=1)
    return len(labels) * max(ROW_HEIGHT, LINE_HEIGHT * lines + 4)


def hover_text(arm: Arm, key: str) -> str:
    """Return the text about an arm that appears when the pointer is over its mark."""
    metric = metric_named(key)
    lines = [
        wrap_label(arm.label, 60),
        f"{metric.heading}: {study_text.estimate_text(metric, arm.estimate(key))}",
        f"trials: {study_text.trials_text(arm)}",
        "emulated" if arm.emulated else "native",
    ]
    if (comparison := arm.comparison(key)) is not None:
        lines.append(f"against {wrap_label(comparison.baseline, 60)}: {study_text.difference_text(arm, key)}")
    return "<br>".join(lines)


def error_bars(intervals: Sequence[Interval]) -> dict[str, Any]:
    """Return the options for error bars of these intervals. None are drawn if all have length 0."""
    up = [interval.high - interval.mean for interval in intervals]
    down = [interval.mean - interval.low for interval in intervals]
    if not any(up) and not any(down):
        return {"visible": False}
    style = {"color": GREY, "thickness": 2, "width": 5}
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **style}


def add_arrows(
    figure: go.Figure, intervals: Sequence[Interval], positions: Sequence[Any], vertical: bool = False
) -> None:
    """Mark the ends where intervals continue beyond the axis. `positions` are their coordinates on the other axis."""
    low, high = ("triangle-down", "triangle-up") if vertical else ("triangle-left", "triangle-right")
    arrows = [
        (end, position, symbol, f"the interval continues: {interval.text}")
        for interval, position in zip(intervals, positions, strict=True)
        for clipped, end, symbol in (
            (interval.clipped_low, interval.low, low),
            (interval.clipped_high, interval.high, high),
        )
        if clipped
    ]
    if not arrows:
        return
    ends, arrow_positions, symbols, texts = (list(column) for column in zip(*arrows, strict=True))
    figure.add_scatter(
        x=arrow_positions if vertical else ends,
        y=ends if vertical else arrow_positions,
        mode="markers",
        marker={"symbol": symbols, "size": 11, "color": GREY},
        cliponaxis=False,
        name=CLIPPED,
        legendgroup=CLIPPED,
        showlegend=not any(trace.name == CLIPPED for trace in figure.data),
        hovertext=texts,
        hoverinfo="text",
    )


def _set_axis(update: Any, axis: Axis) -> None:
    start, stop = axis.range
    if axis.log:  # "D2" labels 1, 2 and 5 times each power of ten
        update(title=axis.title, type="log", range=[log10(start), log10(stop)], dtick="D2")
    else:
        update(title=axis.title, range=[start, stop])


def bars(arms: Sequence[Arm], key: str, limit: tuple[float, str] | None = None) -> go.Figure | None:
    """Draw a bar with an interval for each arm that has the metric. None if no arm has it.

    `limit` is the position (in display units) and label of a reference line.
    """
    data = bar_chart(arms, key, limit=limit)
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
            hovertext=[hover_text(row.arm, key) for row, _ in part],
            hoverinfo="text",
        )
    labels = [names[row.arm.id] for row, _ in rows]
    add_arrows(figure, [interval for _, interval in rows], labels)
    figure.add_scatter(  # numbers beside the bars, because they are hard to read on a hatched bar
        x=[interval.high for _, interval in rows],
        y=labels,
        mode="text",
        text=[f"   {row.text}" for row, _ in rows],
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    if data.limit is not None:
        position, name = data.limit
        annotation = {"text": name, "xanchor": "right"}
        figure.add_vline(x=position, line={"dash": "dash", "color": VERMILION}, annotation=annotation)
    legend = data.clipped or any(row.arm.emulated for row, _ in rows)
    apply_layout(figure, 110 + rows_height(labels), barmode="overlay", bargap=0.25, showlegend=legend)
    _set_axis(figure.update_xaxes, data.axis)
    figure.update_yaxes(categoryorder="array", categoryarray=labels, autorange="reversed", showgrid=False)
    return figure


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
    for shown in (True, False):
        part = [(row, interval) for row, interval in rows if (row.kind in ("shown", "exact")) is shown]
        if not part:
            continue
        labels = [names[row.arm.id] for row, _ in part]
        figure.add_scatter(
            x=[interval.mean for _, interval in part],
            y=labels,
            error_x=error_bars([interval for _, interval in part]),
            mode="markers",
            name="difference shown" if shown else "no difference shown, or too few seeds",
            marker={
                "size": 12,
                "color": BLUE,
                "symbol": "circle" if shown else "circle-open",
                "line": {"width": 2},
            },
            hovertext=[hover_text(row.arm, key) for row, _ in part],
            hoverinfo="text",
        )
        add_arrows(figure, [interval for _, interval in part], labels)
    apply_layout(figure, 130 + rows_height(names.values()), showlegend=True)
    better = {"lower": "<br>left is better", "higher": "<br>right is better"}.get(data.axis.better or "", "")
    figure.update_xaxes(title=data.axis.title + better, range=list(data.axis.range))
    figure.update_yaxes(
        categoryorder="array", categoryarray=list(names.values()), range=[len(rows) - 0.4, -0.6]
    )
    return figure


def bubbles(results: Results, x_key: str, y_key: str) -> go.Figure | None:
    """Draw two metrics against each other, with larger marks for more parameters. None if no arm has both metrics.

    A mark shows the arm's position in `results.arms`, from 1, and has a thick rim if the arm is on a Pareto front.
    """
    data = scatter_chart(results.arms, x_key, y_key, fronts_in(results, x_key, y_key))
    if data is None:
        return None
    figure = go.Figure()
    for emulated in (False, True):
        part = [point for point in data.points if point.arm.emulated is emulated]
        if not part:
            continue
        figure.add_scatter(
            x=[point.x.mean for point in part],
            y=[point.y.mean for point in part],
            error_x=error_bars([point.x for point in part]),
            error_y=error_bars([point.y for point in part]),
            mode="markers+text",
            text=[f"<b>{point.number}</b>" for point in part],
            textposition="top left" if emulated else "top right",
            cliponaxis=False,
            name=EMULATED if emulated else NATIVE,
            marker={
                "size": [8 + 16 * point.size**0.5 for point in part],
                "color": ORANGE if emulated else SKY,
                "symbol": "diamond" if emulated else "circle",
                "opacity": 0.85,
                "line": {"color": EDGE_COLOR, "width": [3 if point.on_front else 0.8 for point in part]},
            },
            hovertext=["<br>".join(hover_text(point.arm, key) for key in (x_key, y_key)) for point in part],
            hoverinfo="text",
        )
    points = data.points
    add_arrows(figure, [point.x for point in points], [point.y.mean for point in points])
    add_arrows(figure, [point.y for point in points], [point.x.mean for point in points], vertical=True)
    apply_layout(figure, 480, showlegend=True)
    _set_axis(figure.update_xaxes, data.x)
    _set_axis(figure.update_yaxes, data.y)
    return figure


def fronts_in(results: Results, first: str, second: str) -> list[Front]:
    """Return the Pareto fronts in exactly these two metrics or, if there are none, those in the most metrics."""
    exact = [front for front in results.fronts if set(front.metrics) == {first, second}]
    max_metrics = max((len(front.metrics) for front in results.fronts), default=0)
    return exact or [front for front in results.fronts if len(front.metrics) == max_metrics]


def curves(
    arm_curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    x_key: str,
    y_key: str,
    emulated: frozenset[str] = frozenset(),
) -> go.Figure | None:
    """Draw loss against time or tokens, one line per trial. `arm_curves` maps an arm's label to its trials' curves.

    `emulated` has the labels of emulated arms. Returns None if no trial has points.
    """
    figure = go.Figure()
    for index, (label, trials) in enumerate(arm_curves.items()):
        trial_points = [points for rows in trials if (points := curve(rows, x_key, y_key))]
        for trial_index, points in enumerate(trial_points):
            figure.add_scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                mode="lines+markers" if len(points) <= 60 else "lines",
                name=wrap_label(label + (" (emulated)" if label in emulated else ""), 60),
                legendgroup=label,
                showlegend=trial_index == 0,
                line={
                    "color": COLORS[index % len(COLORS)],
                    "dash": DASHES[index % len(DASHES)],
                    "width": 2,
                },
                marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 6},
            )
    if not figure.data:
        return None
    apply_layout(figure, 400 + 22 * len(arm_curves))
    figure.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top"})
    figure.update_xaxes(title=CURVE_TITLES[x_key] + (", s" if x_key == "seconds" else ""))
    figure.update_yaxes(title=CURVE_TITLES[y_key])
    return figure


def line(x: Sequence[float], y: Sequence[float], x_title: str, y_title: str, height: int = 260) -> go.Figure:
    """Draw y against x as a single line."""
    figure = go.Figure()
    mode = "lines+markers" if len(x) < 40 else "lines"
    figure.add_scatter(x=list(x), y=list(y), mode=mode, line={"color": BLUE, "width": 2})
    apply_layout(figure, height, showlegend=False)
    figure.update_layout(margin={"t": 24})
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title)
    return figure


def expert_heat_map(cells: Sequence[Sequence[float]], rows: Sequence[str], row_title: str) -> go.Figure:
    """Draw the experts' loads divided by the even share, with a row for each layer or language.

    The colors (cividis) also differ in lightness. A load of 2 or more has the lightest one.
    """
    labels = [wrap_label(name) for name in rows]
    experts, few = len(cells[0]), len(cells[0]) <= MAX_TEXT_COLUMNS
    figure = go.Figure()
    figure.add_heatmap(
        z=[list(row) for row in cells],
        x=[str(expert) for expert in range(experts)],
        y=labels,
        zmin=0.0,
        zmax=2.0,
        colorscale="Cividis",
        texttemplate="%{z:.2f}" if few else None,
        hovertemplate=f"{row_title} %{{y}}, expert %{{x}}: %{{z:.3f}}<extra></extra>",
        showscale=not few,
        colorbar={"title": {"text": "load"}, "thickness": 12},
    )
    apply_layout(figure, 110 + len(rows) * (22 if len(rows) <= 40 else 10), showlegend=False)
    figure.update_xaxes(title="expert", type="category", showgrid=False)
    figure.update_yaxes(title=row_title, type="category", autorange="reversed", showgrid=False)
    return figure


def labelled_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x_title: str, y_title: str
) -> go.Figure:
    """Draw several lines, given as name -> (x, y). They differ by color, dashes and markers."""
    figure = go.Figure()
    for index, (name, (x, y)) in enumerate(lines.items()):
        figure.add_scatter(
            x=list(x),
            y=list(y),
            mode="lines+markers",
            name=wrap_label(name, 60),
            line={"color": COLORS[index % len(COLORS)], "dash": DASHES[index % len(DASHES)], "width": 2},
            marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7},
        )
    apply_layout(figure, 340, showlegend=True)
    figure.update_layout(legend={"orientation": "h", "y": -0.25, "yanchor": "top"})
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title)
    return figure


def breakdown(values: Mapping[str, float], title: str) -> go.Figure:
    """Draw the parts of a modelled total as bars, the largest first. Parts of 0 are left out."""
    positive = sorted(
        ((name, value) for name, value in values.items() if value > 0), key=lambda pair: -pair[1]
    )
    labels = [wrap_label(name) for name, _ in positive]
    figure = go.Figure()
    figure.add_bar(
        x=[value for _, value in positive],
        y=labels,
        orientation="h",
        marker={"color": BLUE, "line": {"color": GREY, "width": 1}},
        text=[f" {value:.3g}" for _, value in positive],
        textposition="auto",
    )
    apply_layout(figure, 120 + rows_height(labels), showlegend=False)
    figure.update_xaxes(title=title)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def ratios(predictions: Sequence[Prediction]) -> go.Figure:
    """Draw the ratio measured / predicted of each prediction, with the range of the prediction as error bars."""
    figure = go.Figure()
    figure.add_vline(x=1.0, line={"color": GREY, "width": 2})
    labels = [wrap_label(f"{prediction.name}: {prediction.quantity}", 34) for prediction in predictions]
    for index, source in enumerate(dict.fromkeys(prediction.source for prediction in predictions)):
        labelled = zip(labels, predictions, strict=True)
        part = [(label, prediction) for label, prediction in labelled if prediction.source == source]
        ranges = [
            to_interval(
                Estimate(
                    prediction.ratio,
                    prediction.measured / prediction.high if prediction.high else None,
                    prediction.measured / prediction.low if prediction.low else None,
                    1,
                )
            )
            for _, prediction in part
        ]
        figure.add_scatter(
            x=[prediction.ratio for _, prediction in part],
            y=[label for label, _ in part],
            error_x=error_bars(ranges),
            mode="markers",
            name=source,
            marker={"size": 11, "symbol": SYMBOLS[index], "color": COLORS[index]},
            hovertext=[
                f"{label}<br>measured / predicted: {prediction.ratio:.3f}" for label, prediction in part
            ],
            hoverinfo="text",
        )
    apply_layout(figure, 130 + rows_height(labels), showlegend=True)
    figure.update_xaxes(title="measured / predicted")
    figure.update_yaxes(categoryorder="array", categoryarray=labels, range=[len(labels) - 0.4, -0.6])
    return figure
