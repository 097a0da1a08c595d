"""Draws the planner's charts with plotly: parts of a total, what fits on a card, and the errors of predictions."""

from collections.abc import Mapping, Sequence
from math import log10

import plotly.graph_objects as go

from deskside.dashboard.plotly_charts import (
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    apply_layout,
    rows_height,
    wrap_label,
)
from deskside.dashboard.runs import Prediction
from deskside.plan.what_fits import FitCell, FitRow, FitState
from deskside.utils.format import count, gib, number, percent

CELL_TEXT = "#111111"  # on the colors of STATES, in both themes
# State of a cell: (name in the legend, color), the least first.
STATES: dict[FitState, tuple[str, str]] = {
    "no": ("does not fit", "#aab2bd"),
    "too short": ("too short to learn anything", "#dfe3e8"),
    "tight": ("fits only at its expected memory", "#f5cf8e"),
    "short": ("fits, but sees fewer than its compute-optimal tokens", "#a9d3f2"),
    "finishes": ("fits and sees its compute-optimal tokens", "#7fcdb0"),
}
CELL_HEIGHT = 30  # pixels
GOOD, FAIR = 0.1, 0.3  # the largest relative errors of predictions that are called so
# Largest error, the last without limit: (its name in the legend, color, symbol).
ACCURACIES = (
    (GOOD, f"at most {percent(GOOD, 0)} off", BLUE, "circle"),
    (FAIR, f"at most {percent(FAIR, 0)} off", ORANGE, "square"),
    (float("inf"), f"more than {percent(FAIR, 0)} off", VERMILION, "diamond"),
)
ERROR_TICKS = (-0.9, -0.75, -0.5, 0.0, 1.0, 3.0, 9.0)  # few, so that they do not collide on a phone


def breakdown(values: Mapping[str, float], title: str) -> go.Figure:
    """Draw the parts of a modelled total as bars, the largest first, without parts below a thousandth of it."""
    least = sum(values.values()) / 1000
    parts = [(name, value) for name, value in values.items() if value > least]
    positive = sorted(parts, key=lambda part: -part[1])
    labels = [wrap_label(name) for name, _ in positive]
    figure = go.Figure()
    figure.add_bar(
        x=[value for _, value in positive],
        y=labels,
        orientation="h",
        marker={"color": BLUE, "line": {"color": GREY, "width": 1}},
        text=[f" {value:.3g}" for _, value in positive],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.3g}<extra></extra>",
    )
    apply_layout(figure, 100 + rows_height(labels), showlegend=False)
    figure.update_layout(margin={"t": 28})
    figure.update_xaxes(title=title, range=[0, 1.15 * max((value for _, value in positive), default=1.0)])
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def fit_map(rows: Sequence[FitRow], hours: Sequence[float]) -> go.Figure:
    """Draw `plan.what_fits`: a cell for each model and number of hours, with its expected bits per byte."""
    columns = [hours_text(value) for value in hours]
    labels = [count(row.params) for row in rows]
    order = list(STATES)
    figure = go.Figure()
    figure.add_heatmap(
        z=[[order.index(cell.state) for cell in row.cells] for row in rows],
        x=columns,
        y=labels,
        zmin=-0.5,
        zmax=len(order) - 0.5,
        colorscale=[
            [end / len(order), color]
            for index, (_, color) in enumerate(STATES.values())
            for end in (index, index + 1)
        ],
        showscale=False,
        xgap=2,
        ygap=2,
        text=[[_cell_text(cell) for cell in row.cells] for row in rows],
        texttemplate="%{text}",
        textfont={"color": CELL_TEXT, "size": 12},
        hovertext=[
            [_cell_hover(row, cell, column) for cell, column in zip(row.cells, columns, strict=True)]
            for row in rows
        ],
        hoverinfo="text",
    )
    for row_index, row in enumerate(rows):
        for index, cell in enumerate(row.cells):
            if cell.is_best:
                x0, y0 = index - 0.47, row_index - 0.44
                line = {"color": CELL_TEXT, "width": 2.5}
                figure.add_shape(type="rect", x0=x0, x1=x0 + 0.94, y0=y0, y1=y0 + 0.88, line=line)
    present = {cell.state for row in rows for cell in row.cells}
    for state, (name, color) in reversed(STATES.items()):
        if state in present:
            marker = {"symbol": "square", "size": 13, "color": color, "line": {"width": 1, "color": GREY}}
            figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name)
    apply_layout(figure, 190 + CELL_HEIGHT * len(rows), showlegend=True)
    figure.update_layout(legend={"orientation": "h", "y": -0.18, "yanchor": "top"}, margin={"t": 32})
    figure.update_xaxes(title="time of the whole plan", type="category", showgrid=False, showline=False)
    figure.update_yaxes(title="parameters of the model", type="category", showgrid=False, showline=False)
    return figure


def hours_text(hours: float) -> str:
    """Return a number of hours as "8 h", "1 day" or "3 days"."""
    days = hours / 24
    if hours < 24 or days != int(days):
        return f"{hours:g} h"
    return "1 day" if days == 1 else "1 week" if days == 7 else f"{days:g} days"


def _cell_text(cell: FitCell) -> str:
    if cell.candidate is None:
        return "no" if cell.state == "no" else "\u2013"
    loss = f"{cell.candidate.loss[1]:.3f}"
    return f"<b>{loss}</b>" if cell.is_best else loss


def _cell_hover(row: FitRow, cell: FitCell, hours: str) -> str:
    lines = [f"<b>{row.preset}, {count(row.params)} parameters, {hours}</b>", STATES[cell.state][0]]
    if (candidate := cell.candidate) is not None:
        low, expected, high = candidate.loss
        tokens, step = candidate.tokens[1], candidate.estimate
        lines += [
            f"{expected:.3f} bits per byte ({low:.2f} to {high:.2f})",
            f"{count(tokens)} tokens, {number(tokens / row.params)} per parameter",
            f"{step.tokens_per_second[1]:,.0f} tokens/s; {gib(step.memory_bytes[1])} of {gib(step.capacity)}",
        ]
    if cell.is_best:
        lines.append("the lowest expected loss in this time, of these sizes")
    return "<br>".join(lines)


def errors(predictions: Sequence[Prediction]) -> go.Figure:
    """Draw how far predictions of one quantity are off, on a logarithmic axis, with the ranges of the predictions."""
    labels = [wrap_label(prediction.name, 34) for prediction in predictions]
    names = [label if labels.count(label) == 1 else f"{label} ({i + 1})" for i, label in enumerate(labels)]
    figure = go.Figure()
    # Unlike annotations, shapes on a logarithmic axis have plain numbers as coordinates.
    figure.add_vrect(x0=1 - GOOD, x1=1 + GOOD, fillcolor=GREY, opacity=0.18, line={"width": 0})
    figure.add_vline(x=1.0, line={"color": GREY, "width": 2})
    lower = 0.0
    for largest, title, color, symbol in ACCURACIES:
        part = [
            (name, prediction)
            for name, prediction in zip(names, predictions, strict=True)
            if lower < abs(prediction.ratio - 1) <= largest or (lower == 0 and prediction.ratio == 1)
        ]
        lower = largest
        if not part:
            continue
        up = [p.measured / p.low - p.ratio if p.low else 0.0 for _, p in part]
        down = [p.ratio - p.measured / p.high if p.high else 0.0 for _, p in part]
        bar = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
        style = {"color": GREY, "thickness": 2, "width": 5, "visible": any(up) or any(down)}
        figure.add_scatter(
            x=[prediction.ratio for _, prediction in part],
            y=[name for name, _ in part],
            error_x={**bar, **style},
            mode="markers+text",
            name=title,
            marker={"size": 11, "symbol": symbol, "color": color},
            text=[f" {percent(prediction.ratio - 1, 0, signed=True)}" for _, prediction in part],
            textposition="top center" if any(up) else "middle right",
            cliponaxis=False,
            hovertext=[_error_hover(prediction) for _, prediction in part],
            hoverinfo="text",
        )
    apply_layout(figure, 120 + rows_height(names), showlegend=True)
    ends = [log10(value) for p in predictions for value in (p.ratio, 0.7, 1.45)]
    figure.update_xaxes(
        title="measured against predicted",
        type="log",
        range=[min(ends) - 0.08, max(ends) + 0.15],
        tickvals=[1 + tick for tick in ERROR_TICKS],
        ticktext=["exact" if tick == 0 else percent(tick, 0, signed=True) for tick in ERROR_TICKS],
    )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=names,
        range=[len(names) - 0.4, -0.6],
        showgrid=False,
    )
    return figure


def _error_hover(prediction: Prediction) -> str:
    lines = [
        wrap_label(prediction.name, 60),
        f"predicted {number(prediction.predicted)}, measured {number(prediction.measured)}",
        f"predicted by: {prediction.source}",
    ]
    if prediction.low is not None and prediction.high is not None:
        lines.insert(2, f"range of the prediction: {number(prediction.low)} to {number(prediction.high)}")
    return "<br>".join(lines)
