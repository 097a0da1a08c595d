"""The common look of the dashboard's plotly charts, and charts of one or several lines and of experts' loads.

Charts are readable in black and white and with any color vision: emulated bars are hatched, lines differ by dashes and
markers, and an open mark means that the verdict is "no difference shown", or that there is only one seed. Colors are
those of Okabe and Ito (2008).
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go

from deskside.report import colors
from deskside.report.chart_data import Axis, Interval, log_ticks
from deskside.study.results import Arm
from deskside.utils.format import tick_text

BLUE, ORANGE, GREEN = colors.BLUE, colors.ORANGE, colors.GREEN
VERMILION, PURPLE, SKY = colors.VERMILION, colors.PURPLE, colors.SKY
GREY, EDGE_COLOR, TEXT_COLOR = "#7f7f7f", "#333333", colors.GREY
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
MAX_TEXT_COLUMNS = 16  # cells of a heat map have their number if there are at most so many columns
ROW_HEIGHT, LINE_HEIGHT = 30, 15  # in pixels: a row of a chart, and a line of its label
MODE_BAR: dict[str, Any] = {
    "displaylogo": False,
    "displayModeBar": True,
    "modeBarButtons": [["toImage", "zoom2d", "resetScale2d"]],
}
LEGEND_HEIGHT = 34  # pixels that keep two lines of a legend, as a phone needs, below the mode bar
CLIPPED = "interval continues"


def apply_layout(figure: go.Figure, height: int, **options: Any) -> go.Figure:
    """Apply the common layout: no wasted margin on a phone, legend above the plot, grid on both axes.

    `height` does not include the legend.
    """
    legend = LEGEND_HEIGHT if options.get("showlegend") else 0
    figure.update_layout(
        height=height + legend,
        margin={"l": 8, "r": 8, "t": 44 + legend, "b": 8},
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
    """Return arm id -> label. Equal labels are numbered: "same (1)", "same (2)"."""
    labels = [arm.label for arm in arms]
    return {
        arm.id: arm.label
        if labels.count(arm.label) == 1
        else f"{arm.label} ({labels[:place].count(arm.label) + 1})"
        for place, arm in enumerate(arms)
    }


def rows_height(labels: Collection[str]) -> int:
    """Return the height in pixels of rows with these wrapped labels; all rows are as high as the highest."""
    lines = max((label.count("<br>") + 1 for label in labels), default=1)
    return len(labels) * max(ROW_HEIGHT, LINE_HEIGHT * lines + 4)


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


def set_axis(update: Any, axis: Axis) -> None:
    """Set the title, range and scale of an axis. `update` is `figure.update_xaxes` or `figure.update_yaxes`."""
    start, stop = axis.range
    if axis.log:
        ticks = log_ticks(axis.range)
        labels = [tick_text(tick) for tick in ticks]
        update(
            title=axis.title, type="log", range=[log10(start), log10(stop)], tickvals=ticks, ticktext=labels
        )
    else:
        update(title=axis.title, range=[start, stop])


def translucent(color: str, alpha: float = 0.18) -> str:
    """Return a color, given as #rrggbb, for an area through which lines remain visible."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


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
    figure.update_layout(legend={"orientation": "h", "y": -0.25, "yanchor": "top"}, margin={"t": 44})
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title)
    return figure
