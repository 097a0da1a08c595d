"""Draws a study's charts with plotly: bars, differences from the baseline, and loss curves.

Their data are those of the report (report/chart_data.py and report/curve_data.py).
"""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

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
    ChartRow,
    Interval,
    RowChart,
    bar_chart,
    forest_chart,
)
from deskside.report.curve_data import CURVE_TITLES, Curve, seed_band, y_range
from deskside.report.study_verdicts import is_better
from deskside.study.metrics import metric_named
from deskside.study.results import Arm, Results

NATIVE, EMULATED = "native", "emulated: speed and power are not those of native hardware"
# A forest plot's mark by the outcome of its comparison: (name in the legend, color, symbol).
OUTCOMES = {
    "better": ("shown to be better", BLUE, "circle"),
    "worse": ("shown to be worse", VERMILION, "diamond"),
    "different": ("difference shown", EDGE_COLOR, "square"),
    "open": ("no difference shown", GREY, "circle-open"),
    "one seed": ("one seed, no interval", GREY, "x-thin-open"),
}
VALUE_WIDTH = 76  # pixels of the column of values at the right of a bar chart


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
