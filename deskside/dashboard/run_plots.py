"""Draws the charts of runs (report/run_chart_data.py) with plotly."""

from collections.abc import Mapping, Sequence
from math import log10

import plotly.graph_objects as go

from deskside.dashboard.plotly_charts import (
    BLUE,
    DASHES,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    apply_layout,
    wrap_label,
)
from deskside.report.chart_data import log_ticks
from deskside.report.run_chart_data import RunChart, RunLine, clipped_top

LINE_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
X_TITLES = {"tokens": "training tokens", "step": "step", "seconds": "training time"}
HEIGHT = 260
TIME_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
MARGIN = 0.06  # free space above and below a line, as a share of its height


def line_style(index: int) -> tuple[str, str]:
    """Return the (color, dash) of the run at a position in the list of runs."""
    return LINE_COLORS[index % len(LINE_COLORS)], DASHES[index // len(LINE_COLORS) % len(DASHES)]


def run_chart(
    chart: RunChart, lines: Sequence[RunLine], places: Mapping[str, int], x_key: str, log: bool
) -> go.Figure:
    """Draw a metric of one or several runs. places: the position of each run, which determines its color."""
    figure = go.Figure()
    unit, size = _x_unit(lines, x_key)
    for line in lines:
        color, dash = line_style(places[line.run])
        style = {"color": color, "dash": dash, "width": 2}
        hover = (
            f"{wrap_label(line.run, 50)}<br>%{{x:,.6g}} {unit or X_TITLES[x_key]}: %{{y:,.6g}}<extra></extra>"
        )
        if line.raw:
            x, y = [x / size for x, _ in line.raw], [y for _, y in line.raw]
            figure.add_scatter(
                x=x, y=y, mode="lines", opacity=0.3, hoverinfo="skip", line={"color": color, "width": 1}
            )
        x, y = [x / size for x, _ in line.points], [y for _, y in line.points]
        mode = "lines+markers" if chart.rare or len(x) < 3 else "lines"
        figure.add_scatter(x=x, y=y, mode=mode, line=style, marker={"size": 6}, hovertemplate=hover)
        if line.final is not None:
            figure.add_scatter(
                x=[line.final[0] / size], y=[line.final[1]], mode="markers", hovertemplate=hover,
                marker={"symbol": "square-open", "size": 9, "color": color, "line": {"width": 2}},
            )  # fmt: skip
    apply_layout(
        figure,
        HEIGHT,
        showlegend=False,
        title={"text": ", ".join(filter(None, (chart.title, chart.unit))), "font": {"size": 14}},
    )
    figure.update_layout(margin={"t": 40})
    x_format = {"tickformat": "~s"} if x_key == "tokens" else {}
    figure.update_xaxes(title=X_TITLES[x_key] + (f", {unit}" if unit else ""), rangemode="tozero", **x_format)
    figure.update_yaxes(**_y_axis(chart, lines, log))
    return figure


def _x_unit(lines: Sequence[RunLine], x_key: str) -> tuple[str, float]:
    """Return the name of the unit of x and its size; of tokens and steps ("", 1)."""
    if x_key != "seconds":
        return "", 1.0
    longest = max(x for line in lines for x, _ in [*line.points, *([line.final] if line.final else [])])
    return next(((name, size) for name, size in TIME_UNITS if longest > 3 * size), TIME_UNITS[-1])


def _y_axis(chart: RunChart, lines: Sequence[RunLine], log: bool) -> dict[str, object]:
    """Return the options of the y axis. On a logarithmic one, ticks are labelled in full."""
    values = [
        y for line in lines for _, y in [*line.points, *line.raw, *([line.final] if line.final else [])]
    ]
    low, high = min(values), max(values)
    if log and chart.log and low > 0:
        low, high = low / 1.03, high * 1.03
        ticks = log_ticks((low, high))
        return {
            "type": "log",
            "range": [log10(low), log10(high)],
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
        }
    if chart.from_zero:
        return {"range": [0, 1.15 * high or 1.0], "exponentformat": "power" if chart.key == "lr" else "SI"}
    tops = [
        top for line in lines if (top := clipped_top([y for _, y in line.raw or line.points])) is not None
    ]
    if len(tops) == len(lines):
        high = min(high, max(tops))
    gap = MARGIN * (high - low) or abs(high) * MARGIN or 1.0
    return {"range": [low - gap, high + gap]}
