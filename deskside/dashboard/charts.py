"""The charts of arms and runs, as plotly figures. Each takes prepared data and computes nothing but units.

They read in black and white and with any colour vision: emulated arms are hatched, lines differ by dashes and markers,
what is no shown difference is an open mark. Colours are those of Okabe and Ito (2008), which repeat it for the rest.
"""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from deskside.dashboard.forecasts import Forecast
from deskside.report import intervals
from deskside.report import study_words as words
from deskside.run.record import number
from deskside.study.results import Arm, Estimate, Results

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7f7f7f",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
ROW, LINE = 30, 15  # pixels of one bar, of one line of its label
MODE_BAR: dict[str, Any] = {
    "displaylogo": False,
    "displayModeBar": True,
    "modeBarButtons": [["toImage", "zoom2d", "resetScale2d"]],
    "toImageButtonOptions": {"format": "png", "scale": 2, "filename": "deskside"},
}
NEAR = 3.0  # times the longest bar
NATIVE, EMULATED = "native", "emulated: its speed and power are not the format's"


def layout(figure: go.Figure, height: int, **more: Any) -> go.Figure:
    """The house's frame: no wasted margin on a phone, legend above the plot, grid on both axes."""
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 44, "b": 8},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        font={"size": 13},
        modebar={"orientation": "h", "bgcolor": "rgba(0,0,0,0)"},
        dragmode=False,
        **more,
    )
    figure.update_xaxes(automargin=True, showline=True, gridcolor="rgba(127,127,127,0.3)", zeroline=False)
    figure.update_yaxes(automargin=True, showline=True, gridcolor="rgba(127,127,127,0.3)", zeroline=False)
    return figure


def folded(text: str, width: int = 28) -> str:
    """A label on several lines, for plotly; its own markup is made harmless."""
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return "<br>".join(textwrap.wrap(safe, width, break_long_words=True) or [""])


def room(names: Collection[str]) -> int:
    """Pixels that rows of these folded labels need. All rows are as high as the one with the most lines."""
    lines = max((name.count("<br>") + 1 for name in names), default=1)
    return len(names) * max(ROW, LINE * lines + 4)


def error(found: Sequence[Estimate], scale: float, axis: tuple[float, float] | None = None) -> dict[str, Any]:
    """Error bars of these estimates, as far as the axis goes; an arm without an interval gets none."""
    shown = [intervals.cut(one, axis or (-math.inf, math.inf)) for one in found]
    up = [(one.high - f.mean) * scale for one, f in zip(shown, found, strict=True)]
    down = [(f.mean - one.low) * scale for one, f in zip(shown, found, strict=True)]
    if not any(up) and not any(down):
        return {"visible": False}
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "color": GREY,
        "thickness": 2,
        "width": 5,
    }


def arrows(
    figure: go.Figure,
    found: Sequence[Estimate],
    scale: float,
    axis: tuple[float, float],
    across: Sequence[Any] | None = None,
    up: Sequence[Any] | None = None,
) -> None:
    """Marks at the edge of the plot where error bars go on beyond it. across or up: where the other axis has them."""
    ends: list[tuple[float, Any, str, str]] = []
    for one, other in zip(found, (up if across is None else across) or (), strict=True):
        shown = intervals.cut(one, axis)
        told = f"the interval goes on: {_short(one.low, scale)} to {_short(one.high, scale)}"
        if shown.goes_on_below:
            ends.append(
                (shown.low * scale, other, "triangle-left" if across is None else "triangle-down", told)
            )
        if shown.goes_on_above:
            ends.append(
                (shown.high * scale, other, "triangle-right" if across is None else "triangle-up", told)
            )
    if not ends:
        return
    places, others = [end for end, *_ in ends], [other for _, other, *_ in ends]
    figure.add_scatter(
        x=places if across is None else others,
        y=others if across is None else places,
        mode="markers",
        marker={"symbol": [symbol for *_, symbol, _ in ends], "size": 11, "color": GREY},
        cliponaxis=False,
        name="interval goes on",
        legendgroup="interval goes on",
        showlegend=not any(trace.name == "interval goes on" for trace in figure.data),
        hovertext=[told for *_, told in ends],
        hoverinfo="text",
    )


def _short(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:,.4g}"


def bars(results: Results, key: str, limit: tuple[float, str] | None = None) -> go.Figure | None:
    """One metric of every arm that has it, as bars with intervals. None when no arm has it.

    limit: a line to hold it against in the shown unit, and its name; left out when it is far beyond all bars.
    """
    metric, arms = words.metric(key), words.measured(results.arms, key)
    if not arms:
        return None
    figure = go.Figure()
    names = labels(arms)
    everything = [arm.estimates[key] for arm in arms]
    axis = intervals.window([Estimate(0.0, None, None, 1), *everything])  # bars begin at 0
    for emulated in (False, True):
        part = [arm for arm in arms if arm.emulated is emulated]
        if not part:
            continue
        found = [arm.estimates[key] for arm in part]
        figure.add_bar(
            y=[names[arm.id] for arm in part],
            x=[f.mean * metric.scale for f in found],
            error_x=error(found, metric.scale, axis),
            orientation="h",
            name=EMULATED if emulated else NATIVE,
            marker={
                "color": SKY if emulated else BLUE,
                "line": {"color": "#333333", "width": 1},
                "pattern": {
                    "shape": "/" if emulated else "",
                    "fgcolor": "#333333",
                    "fillmode": "overlay",
                    "size": 7,
                },
            },
            hovertext=[hover(arm, key) for arm in part],
            hoverinfo="text",
        )
    arrows(figure, everything, metric.scale, axis, up=[names[arm.id] for arm in arms])
    ends = [intervals.cut(found, axis).high for found in everything]
    figure.add_scatter(  # beside the bars: on a hatched one a number is hard to read
        x=[end * metric.scale for end in ends],
        y=[names[arm.id] for arm in arms],
        mode="text",
        text=[f"   {words.value(metric, found.mean)}" for found in everything],
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    right = 0.0
    if limit is not None and is_near(limit[0] / metric.scale, ends):
        right = limit[0] / metric.scale
        figure.add_vline(
            x=limit[0],
            line={"dash": "dash", "color": VERMILION},
            annotation={"text": limit[1], "xanchor": "right"},
        )
    layout(
        figure,
        110 + room(names.values()),
        barmode="overlay",
        bargap=0.25,
        showlegend=any(a.emulated for a in arms)
        or any(intervals.cut(f, axis).goes_on_above for f in everything),
    )
    figure.update_xaxes(
        title=words.unit(metric),
        range=[1.3 * min(0.0, *ends) * metric.scale, 1.3 * max(*ends, right) * metric.scale],
    )
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[names[arm.id] for arm in arms],
        autorange="reversed",
        showgrid=False,
    )
    return figure


def is_near(limit: float, ends: Sequence[float]) -> bool:
    """Whether bars that end there can still be told apart beside a line at the limit."""
    return limit <= NEAR * max(ends)


def hover(arm: Arm, key: str) -> str:
    """What a bar or a bubble says when it is pointed at."""
    metric = words.metric(key)
    lines = [
        folded(arm.label, 60),
        f"{words.unit(metric)}: {words.estimate(metric, words.known(arm, key))}",
        f"trials: {words.state(arm)}",
        "emulated" if arm.emulated else "native",
    ]
    against = words.comparison(arm, key)
    if against is not None:
        lines.append(f"against {folded(against.baseline, 60)}: {words.difference(arm, key)}")
    return "<br>".join(lines)


def labels(arms: Sequence[Arm]) -> dict[str, str]:
    """id -> label folded for an axis; the id where two arms have the same label."""
    taken = [arm.label for arm in arms]
    return {arm.id: folded(arm.label if taken.count(arm.label) == 1 else arm.id) for arm in arms}


def forest(results: Results, key: str) -> go.Figure | None:
    """Relative differences against each arm's baseline with their intervals; None when there are none."""
    metric = words.metric(key)
    pairs = [(arm, found) for arm in results.arms if (found := words.comparison(arm, key)) is not None]
    pairs = [(arm, found) for arm, found in pairs if number(found.relative) is not None]
    if not pairs:
        return None
    names = labels([arm for arm, _ in pairs])
    figure = go.Figure()
    figure.add_vline(x=0, line={"color": GREY, "width": 2})
    bounds = [
        100 * end
        for _, f in pairs
        for end in (number(f.relative_low), number(f.relative_high))
        if end is not None
    ]
    limit = intervals.reach([100 * f.relative for _, f in pairs], bounds)
    for shown in (True, False):
        part = [(a, f) for a, f in pairs if (f.verdict in ("lower", "higher", "exact")) is shown]
        if not part:
            continue
        ends = [
            Estimate(100 * f.relative, _percent(f.relative_low), _percent(f.relative_high), f.n)
            for _, f in part
        ]
        figure.add_scatter(
            x=[end.mean for end in ends],
            y=[names[arm.id] for arm, _ in part],
            error_x=error(ends, 1.0, (-limit, limit)),
            mode="markers",
            name="difference shown" if shown else "no difference shown, or too few seeds",
            marker={
                "size": 12,
                "color": BLUE,
                "symbol": "circle" if shown else "circle-open",
                "line": {"width": 2},
            },
            hovertext=[hover(arm, key) for arm, _ in part],
            hoverinfo="text",
        )
        arrows(figure, ends, 1.0, (-limit, limit), up=[names[arm.id] for arm, _ in part])
    layout(figure, 130 + room(names.values()), showlegend=True)
    better = {"lower": "<br>left is better", "higher": "<br>right is better", None: ""}[metric.better]
    figure.update_xaxes(title=f"{metric.label}, % against its baseline{better}", range=[-limit, limit])
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[names[arm.id] for arm, _ in pairs],
        range=[len(pairs) - 0.4, -0.6],
    )
    return figure


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def curves(
    lines: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    across: str,
    key: str,
    emulated: frozenset[str] = frozenset(),
) -> go.Figure | None:
    """Loss against time or tokens. lines: label of an arm -> curves of its trials. None when nothing has points."""
    figure = go.Figure()
    for place, (label, trials) in enumerate(lines.items()):
        first = True
        for rows in trials:
            points = [(number(row.get(across)), number(row.get(key))) for row in rows]
            known = [(x, y) for x, y in points if x is not None and y is not None]
            if not known:
                continue
            figure.add_scatter(
                x=[x for x, _ in known],
                y=[y for _, y in known],
                mode="lines+markers" if len(known) <= 60 else "lines",
                name=folded(label + (" (emulated)" if label in emulated else ""), 60),
                legendgroup=label,
                showlegend=first,
                line={
                    "color": COLOURS[place % len(COLOURS)],
                    "dash": DASHES[place % len(DASHES)],
                    "width": 2,
                },
                marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 6},
            )
            first = False
    if not figure.data:
        return None
    layout(figure, 400 + 22 * len(lines))
    figure.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top"})
    figure.update_xaxes(title={"seconds": "time, s", "tokens": "training tokens"}[across])
    unit = {"loss": "training loss, nats per token", "val_bpb": "validation loss, bits per byte"}[key]
    figure.update_yaxes(title=unit)
    return figure


def line(x: Sequence[float], y: Sequence[float], x_title: str, y_title: str, height: int = 260) -> go.Figure:
    """One plain line."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(x),
        y=list(y),
        mode="lines+markers" if len(x) < 40 else "lines",
        line={"color": BLUE, "width": 2},
    )
    layout(figure, height, showlegend=False)
    figure.update_layout(margin={"t": 24})
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title)
    return figure


def items(values: Mapping[str, float], title: str, capacity: tuple[float, str] | None = None) -> go.Figure:
    """What a modelled sum consists of, as bars, the largest first. capacity: a line, and what it is."""
    known = sorted(((name, value) for name, value in values.items() if value > 0), key=lambda pair: -pair[1])
    figure = go.Figure()
    figure.add_bar(
        x=[value for _, value in known],
        y=[folded(name) for name, _ in known],
        orientation="h",
        marker={"color": BLUE, "line": {"color": GREY, "width": 1}},
        text=[f" {value:.3g}" for _, value in known],
        textposition="auto",
    )
    if capacity is not None:
        figure.add_vline(
            x=capacity[0],
            line={"dash": "dash", "color": VERMILION},
            annotation={"text": capacity[1], "xanchor": "right"},
        )
    layout(figure, 120 + room([folded(name) for name, _ in known]), showlegend=False)
    figure.update_xaxes(title=title)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def ratios(rows: Sequence[Forecast]) -> go.Figure:
    """Measured over predicted, one mark per prediction, with the prediction's range; 1 is a hit."""
    figure = go.Figure()
    figure.add_vline(x=1.0, line={"color": GREY, "width": 2})
    names = [folded(f"{row.what}: {row.quantity}", 34) for row in rows]
    for place, by in enumerate(dict.fromkeys(row.by for row in rows)):
        part = [(name, row) for name, row in zip(names, rows, strict=True) if row.by == by]
        ends = [
            Estimate(
                row.ratio,
                row.measured / row.high if row.high else None,
                row.measured / row.low if row.low else None,
                1,
            )
            for _, row in part
        ]
        figure.add_scatter(
            x=[end.mean for end in ends],
            y=[name for name, _ in part],
            error_x=error(ends, 1.0),
            mode="markers",
            name=by,
            marker={"size": 11, "symbol": SYMBOLS[place], "color": COLOURS[place]},
            hovertext=[f"{name}<br>measured / predicted: {row.ratio:.3f}" for name, row in part],
            hoverinfo="text",
        )
    layout(figure, 130 + room(names), showlegend=True)
    figure.update_xaxes(title="measured / predicted")
    figure.update_yaxes(categoryorder="array", categoryarray=names, range=[len(names) - 0.4, -0.6])
    return figure
