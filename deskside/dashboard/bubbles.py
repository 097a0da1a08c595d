"""Two metrics of a group's arms against each other, as bubbles: the chart of the Efficiency tab."""

import math
from typing import Any

import plotly.graph_objects as go

from deskside.dashboard.charts import EMULATED, NATIVE, ORANGE, SKY, arrows, error, hover, layout
from deskside.report import intervals
from deskside.report import study_words as words
from deskside.study.results import Arm, Front, Results


def bubble(results: Results, across: str, up: str, by: str = "parameters") -> go.Figure | None:
    """Two metrics against each other, the size of a mark by a third; arms on the front have a thick rim.

    A mark bears the number of its arm in `both`. None when no arm has both.
    """
    arms = both(results, across, up)
    if not arms:
        return None
    first, second = words.metric(across), words.metric(up)
    sizes = {arm.id: found.mean if (found := words.known(arm, by)) else 0.0 for arm in arms}
    largest = max(sizes.values()) or 1.0
    place = {arm.id: number_ for number_, arm in enumerate(arms, 1)}
    fronts = {name for front in fronts_of(results, across, up) for name in front.arms}
    figure = go.Figure()
    everywhere = [[arm.estimates[key] for arm in arms] for key in (across, up)]
    logs = [intervals.wide(found) for found in everywhere]
    plot = [intervals.window(found, log) for found, log in zip(everywhere, logs, strict=True)]
    for emulated in (False, True):
        part = [arm for arm in arms if arm.emulated is emulated]
        if not part:
            continue
        x, y = ([arm.estimates[key] for arm in part] for key in (across, up))
        figure.add_scatter(
            x=[f.mean * first.scale for f in x],
            y=[f.mean * second.scale for f in y],
            error_x=error(x, first.scale, plot[0]),
            error_y=error(y, second.scale, plot[1]),
            mode="markers+text",
            text=[f"<b>{place[arm.id]}</b>" for arm in part],
            textposition="top left" if emulated else "top right",
            cliponaxis=False,
            name=EMULATED if emulated else NATIVE,
            marker={
                "size": [8 + 16 * (sizes[arm.id] / largest) ** 0.5 for arm in part],
                "color": ORANGE if emulated else SKY,
                "symbol": "diamond" if emulated else "circle",
                "opacity": 0.85,
                "line": {"color": "#333333", "width": [3 if arm.id in fronts else 0.8 for arm in part]},
            },
            hovertext=[f"{hover(arm, across)}<br>{hover(arm, up)}" for arm in part],
            hoverinfo="text",
        )
    means = [
        [f.mean * metric.scale for f in found]
        for found, metric in zip(everywhere, (first, second), strict=True)
    ]
    arrows(figure, everywhere[0], first.scale, plot[0], up=means[1])
    arrows(figure, everywhere[1], second.scale, plot[1], across=means[0])
    layout(figure, 480, showlegend=True)
    figure.update_xaxes(title=_axis(across), **_range(plot[0], first.scale, logs[0]))
    figure.update_yaxes(title=_axis(up), **_range(plot[1], second.scale, logs[1]))
    return figure


def fronts_of(results: Results, first: str, second: str) -> list[Front]:
    """The groups' fronts in just these two metrics; those in the most metrics where there are none."""
    exact = [front for front in results.fronts if set(front.metrics) == {first, second}]
    most = max((len(front.metrics) for front in results.fronts), default=0)
    return exact or [front for front in results.fronts if len(front.metrics) == most]


def both(results: Results, first: str, second: str) -> list[Arm]:
    """The arms that have two metrics."""
    return [arm for arm in words.measured(results.arms, first) if words.known(arm, second) is not None]


def _range(ends: tuple[float, float], scale: float, log: bool) -> dict[str, Any]:
    if not log:
        return {"range": [end * scale for end in ends]}
    # "D2": labels at 1, 2 and 5 times a power of ten.
    return {"type": "log", "range": [math.log10(end * scale) for end in ends], "dtick": "D2"}


def _axis(key: str) -> str:
    metric = words.metric(key)
    return words.unit(metric) + (
        {"lower": " (less is better)", "higher": " (more is better)"}.get(metric.better or "", "")
    )
