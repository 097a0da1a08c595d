"""Draws the charts of a search (report/search_chart_data.py) with plotly."""

from collections.abc import Sequence
from math import log10

import plotly.graph_objects as go

from deskside.dashboard.plotly_charts import BLUE, GREY, ORANGE, apply_layout, rows_height, wrap_label
from deskside.report.chart_data import log_ticks
from deskside.report.search_chart_data import LOSS_TITLE, BestSoFar, SettingSlice
from deskside.utils.format import tick_text

HEIGHT, SLICE_HEIGHT = 320, 240  # pixels


def best_chart(data: BestSoFar) -> go.Figure:
    """Draw the finished trials and the best so far."""
    figure = go.Figure()
    x, losses = zip(*data.points, strict=True)
    figure.add_scatter(
        x=x,
        y=losses,
        mode="markers",
        name="trial",
        marker={"color": GREY, "size": 8, "symbol": "circle-open", "line": {"width": 2}},
        text=[f"trial {number}" for number in data.numbers],
        hovertemplate="%{text}: %{y:.4f}<extra></extra>",
    )
    figure.add_scatter(
        x=[x for x, _ in data.best],
        y=[loss for _, loss in data.best],
        mode="lines",
        name="best so far",
        line={"color": BLUE, "width": 2, "shape": "hv"},
        hovertemplate="best so far: %{y:.4f}<extra></extra>",
    )
    apply_layout(figure, HEIGHT)
    figure.update_xaxes(title=data.x_title, rangemode="tozero")
    figure.update_yaxes(title=LOSS_TITLE, tickformat=".3f")
    return figure


def importance_chart(shares: Sequence[tuple[str, float]]) -> go.Figure:
    """Draw the importance of each setting as a bar, the largest at the top."""
    labels = [wrap_label(key) for key, _ in shares]
    values = [share for _, share in shares]
    figure = go.Figure()
    figure.add_bar(
        x=values,
        y=labels,
        orientation="h",
        marker={"color": BLUE},
        text=[f"{share:.0%}" for share in values],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.1%}<extra></extra>",
    )
    apply_layout(figure, 90 + rows_height(labels), showlegend=False)
    figure.update_layout(margin={"t": 16, "r": 48})
    figure.update_xaxes(title="share", tickformat=".0%", range=[0, 1.1 * max(values) or 1.0])
    figure.update_yaxes(autorange="reversed")
    return figure


def slice_chart(data: SettingSlice, best: int | None) -> go.Figure:
    """Draw the losses by one setting. best: number of the trial to mark besides the default, which is trial 0."""
    figure = go.Figure()
    marks: dict[int | None, tuple[str, str, str]] = {best: ("best", ORANGE, "diamond")}
    marks[0] = ("default", BLUE, "square")  # also if no other is better
    groups: dict[int | None, list[int]] = {}
    for place, number in enumerate(data.numbers):
        groups.setdefault(number if number in marks else None, []).append(place)
    for mark in (None, 0, best):
        places = groups.pop(mark, [])
        name, color, symbol = ("trial", GREY, "circle-open") if mark is None else marks[mark]
        figure.add_scatter(
            x=[data.x[place] for place in places],
            y=[data.losses[place] for place in places],
            mode="markers",
            name=name,
            marker={
                "color": color,
                "symbol": symbol,
                "size": 8 if mark is None else 12,
                "line": {"width": 2},
            },
            text=[f"trial {data.numbers[place]}" for place in places],
            hovertemplate="%{text}: %{y:.4f}<extra></extra>",
        )
    apply_layout(figure, SLICE_HEIGHT, showlegend=False)
    figure.update_layout(margin={"t": 24})
    figure.update_xaxes(title=data.key)
    figure.update_yaxes(title=LOSS_TITLE, tickformat=".3f")
    if data.choices:
        figure.update_xaxes(
            tickvals=list(range(len(data.choices))), ticktext=[wrap_label(one) for one in data.choices]
        )
        figure.update_xaxes(range=[-0.5, len(data.choices) - 0.5])
    elif data.ticks:
        figure.update_xaxes(tickvals=data.ticks, ticktext=[tick_text(tick) for tick in data.ticks])
    elif data.log:
        low, high = min(data.x) / 1.15, max(data.x) * 1.15
        ticks = log_ticks((low, high))
        figure.update_xaxes(
            type="log",
            range=[log10(low), log10(high)],
            tickvals=ticks,
            ticktext=[tick_text(tick) for tick in ticks],
        )
    return figure
