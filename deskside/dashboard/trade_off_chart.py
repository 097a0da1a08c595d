"""Draws two metrics of a study's arms against each other with plotly, with names beside the points.

Where a name has no place, the point has a number, and a list below the chart has the names.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from math import log10
from typing import Any

import plotly.graph_objects as go

from deskside.dashboard.label_places import Line, Mark, label_offset, place_labels
from deskside.dashboard.level_labels import level_labels
from deskside.dashboard.plotly_charts import (
    COLORS,
    EDGE_COLOR,
    GREY,
    SYMBOLS,
    add_arrows,
    apply_layout,
    error_bars,
    set_axis,
    unique_labels,
    wrap_label,
)
from deskside.dashboard.study_charts import hover_text
from deskside.report import study_text
from deskside.report.chart_data import Axis, ScatterChart, ScatterPoint, scatter_chart
from deskside.study.results import Factor, Front, Results

ON_FRONT = "Pareto front"
SCATTER_HEIGHT = 500  # pixels
# Pixels of the plot in it, without axes and legend: on a phone, and on a screen from WIDE_SCREEN on.
NARROW, WIDE = (265.0, 345.0), (700.0, 395.0)
WIDE_SCREEN = 1100
LABEL_COLUMNS = 24
CHARACTER_WIDTH, TEXT_HEIGHT = 6.4, 18.0  # pixels of a character of a label, on average, and of its line
DIGIT_WIDTH = 8.0
HIDDEN_NUMBERS = "(Marks that lie over each other may have no place for a number. Point at one for its name.)"
BOTH, WIDE_ONLY, NARROW_ONLY = "", "wide", "narrow"  # names of annotations: the screens that show them
Side = tuple[int, int]
Size = tuple[float, float]


def fronts_in(results: Results, first: str, second: str) -> list[Front]:
    """Return the Pareto fronts in exactly these two metrics or, if there are none, those in the most metrics."""
    exact = [front for front in results.fronts if set(front.metrics) == {first, second}]
    max_metrics = max((len(front.metrics) for front in results.fronts), default=0)
    return exact or [front for front in results.fronts if len(front.metrics) == max_metrics]


def trade_off(results: Results, x_key: str, y_key: str, factor: Factor | None = None) -> go.Figure | None:
    """Draw two metrics of each arm against each other. None if no arm has both.

    Colors and symbols represent the levels of `factor`. Larger marks have more parameters, open ones are emulated, and
    a ring marks the Pareto front. Labels are placed where they cover nothing. Points without a place for a label are
    numbered. There are annotations for a phone and for a wide screen, and `screen_style` hides the other ones.
    """
    data = scatter_chart(results.arms, x_key, y_key, fronts_in(results, x_key, y_key))
    if data is None:
        return None
    figure = go.Figure()
    _add_front(figure, data)
    by_level = _by_level(data, factor)
    levels = level_labels(results.arms, factor.name, list(by_level)) if factor is not None else {}
    for index, (level, points) in enumerate(by_level.items()):
        symbol = SYMBOLS[index % len(SYMBOLS)]
        figure.add_scatter(
            x=[point.x.mean for point in points],
            y=[point.y.mean for point in points],
            error_x=_thin(error_bars([point.x for point in points])),
            error_y=_thin(error_bars([point.y for point in points])),
            mode="markers",
            name=wrap_label(levels.get(level, level), 40),
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
    # A name that ends before what tells it from another is replaced by a number.
    clear = [i for i in order if texts.count(texts[i]) == 1]
    front, (across, upright) = _front_lines(data), _interval_lines(data)
    # Rather a label on an upright interval than one that an interval strikes through, and rather that than none.
    kept_free = ([*front, *across, *upright], [*front, *across], front)

    def placed(
        marks: Sequence[Mark], labelled: Sequence[int], sizes: Sequence[Size], sides: Mapping[int, Side]
    ) -> dict[int, Side]:
        for lines in kept_free:
            sides = place_labels(marks, labelled, sizes, sides, lines)
        return dict(sides)

    on_both = placed(marks, clear, (NARROW, WIDE), {})
    on_wide = placed(marks, clear, (WIDE,), on_both)
    numbers = {i: str(n) for n, i in enumerate((i for i in range(len(marks)) if i not in on_both), 1)}
    numbered = [
        replace(mark, width=DIGIT_WIDTH * len(numbers[i])) if i in numbers else mark
        for i, mark in enumerate(marks)
    ]
    for index, side in on_wide.items():
        screens = BOTH if index in on_both else WIDE_ONLY
        _add_label(figure, data, index, marks[index], side, texts[index], screens)
    for index, side in placed(numbered, order, (NARROW,), on_both).items():
        if index in numbers:
            _add_label(figure, data, index, numbered[index], side, numbers[index], NARROW_ONLY)
    unnamed = [numbered[i] if i not in on_wide else mark for i, mark in enumerate(marks)]
    for index, side in placed(unnamed, order, (WIDE,), on_wide).items():
        if index not in on_wide:
            _add_label(figure, data, index, unnamed[index], side, numbers[index], WIDE_ONLY)
    listed = [(number, names[data.points[i].arm.id], i in on_wide) for i, number in numbers.items()]
    figure.update_layout(meta={"numbered": listed})


def _add_label(
    figure: go.Figure, data: ScatterChart, index: int, mark: Mark, side: Side, text: str, screens: str
) -> None:
    """Write a text at a side of a point. screens: `BOTH`, `WIDE_ONLY` or `NARROW_ONLY`."""
    point, (right, down) = data.points[index], label_offset(mark, side)
    figure.add_annotation(
        x=log10(point.x.mean) if data.x.log else point.x.mean,
        y=log10(point.y.mean) if data.y.log else point.y.mean,
        text=wrap_label(text, LABEL_COLUMNS),
        font={"size": 12},
        showarrow=False,
        xshift=right,
        yshift=-down,
        borderpad=0,
        name=screens,
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


def screen_style(figure: go.Figure, key: str) -> str:
    """Return a style sheet that hides what is for other screens: annotations, and entries of `number_list`.

    `key` is that of the container in which both stand.
    """

    def hidden(screens: str) -> str:
        indices = [index for index, note in enumerate(figure.layout.annotations) if note.name == screens]
        notes = [f'.st-key-{key} .annotation[data-index="{index}"]' for index in indices]
        return ",".join([*notes, f".st-key-{key} .{screens}"])

    return (
        f"<style>@media (max-width: {WIDE_SCREEN}px) {{{hidden(WIDE_ONLY)} {{display: none}}}}"
        f"@media (min-width: {WIDE_SCREEN + 1}px) {{{hidden(NARROW_ONLY)} {{display: none}}}}</style>"
    )


def number_list(figure: go.Figure) -> str:
    """Return the names of the numbered points as HTML; the empty string if there are none."""
    numbered = figure.layout.meta["numbered"]
    if not numbered:
        return ""
    entries = "".join(
        f'<li class="{NARROW_ONLY if named_if_wide else BOTH}"><b>{number}</b> {escape(name)}</li>'
        for number, name, named_if_wide in numbered
    )
    entries += f"<li>{HIDDEN_NUMBERS}</li>"
    screens = NARROW_ONLY if all(named_if_wide for _, _, named_if_wide in numbered) else BOTH
    return f'<ul class="numbered {screens}" aria-label="names of the numbered points">{entries}</ul>'
