"""Chart data: what each chart of a study shows, independent of the plotting library.

The report (matplotlib, `charts.py`) and the dashboard (plotly, `dashboard/charts.py`) draw the same series, intervals,
labels, order and axis ranges, which are decided here. Numbers are in the unit that is shown.

Axes follow the means. With two seeds an interval can be many times as wide as the differences between the arms, so an
interval that reaches beyond the axis is clipped, and the clipped end is marked with an arrow.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deskside.report import study_text
from deskside.report.study_text import by_baseline, measured_arms
from deskside.run.record import number
from deskside.study.results import NO_DIFFERENCE, Arm, Comparison, Estimate, Front, Results
from deskside.study.stats.metrics import QUALITY, SPEED, SPEED_AND_POWER, Metric, metric_named
from deskside.utils.format import percent, percent_digits

REACH = 0.5  # an axis follows intervals beyond the means by this part of the means' span, or by their median width
EDGE = 0.12  # part of the span that is left free at both ends
MAX_REACH = 3.0  # an axis of relative differences reaches at most this multiple of the largest one
LOG_RATIO = 8  # means further apart than this factor get a logarithmic axis
CLIPPED = "An arrow is an interval that continues beyond the plot."
Range = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A mean with the part of its interval that the axis shows. `clipped_*`: the interval continues beyond the axis.

    `text` is the whole interval.
    """

    mean: float
    low: float
    high: float
    clipped_low: bool = False
    clipped_high: bool = False
    text: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis: title, range in the shown unit, scale, and which direction is better ("lower", "higher" or None)."""

    title: str
    range: Range
    log: bool = False
    better: str | None = None


def interval(found: Estimate, axis: Range = (-math.inf, math.inf), scale: float = 1.0) -> Interval:
    """Return an estimate times `scale`, its interval clipped to `axis` (in the scaled unit).

    An estimate without an interval is its mean alone.
    """
    mean = found.mean * scale
    low, high = (mean if end is None else end * scale for end in (number(found.low), number(found.high)))
    return Interval(
        mean,
        max(low, axis[0]),
        min(high, axis[1]),
        low < axis[0],
        high > axis[1],
        f"{low:,.4g} to {high:,.4g}",
    )


def needs_log(found: Sequence[Estimate]) -> bool:
    """Return whether these means need a logarithmic axis."""
    means = [one.mean for one in found]
    return min(means) > 0 and max(means) > LOG_RATIO * min(means)


def axis_range(found: Sequence[Estimate], log: bool = False) -> Range:
    """Return where the axis of these estimates begins and ends, in their unit. With `log` all means must be > 0."""

    def place(value: float) -> float:
        return value if not log else math.log10(value) if value > 0 else -math.inf

    means = [place(one.mean) for one in found]
    first, last = min(means), max(means)
    ends = [
        (place(end), place(one.mean))
        for one in found
        for end in (number(one.low), number(one.high))
        if end is not None
    ]
    usual = statistics.median([abs(end - mean) for end, mean in ends]) if ends else 0.0
    usual = usual if math.isfinite(usual) else 0.0
    span = (last - first) or 2 * usual or abs(first) / 10 or 1.0
    most = max(REACH * span, usual)
    down, up = first - min([first, *(e for e, _ in ends)]), max([last, *(e for e, _ in ends)]) - last
    start = first - min(down, most) - EDGE * span
    stop = last + min(up, most) + EDGE * span
    if log:
        return 10**start, 10**stop
    return (max(start, 0.0) if min(means) > 0 else start), stop


def difference_limit(middles: Sequence[float], ends: Sequence[float]) -> float:
    """Return how far an axis of relative differences reaches to both sides of zero.

    `middles` are the differences (at least one), `ends` the ends of their intervals.
    """
    largest = max(abs(middle) for middle in middles)
    furthest = max((abs(end) for end in ends), default=0.0)
    return 1.12 * max(largest, min(furthest, MAX_REACH * largest or 1.0)) or 1.0


def most_different(arms: Sequence[Arm], key: str, most: int | None) -> list[Arm]:
    """Return at most `most` arms in their order: baselines, then those that differ most from theirs in one metric.

    An arm without a comparison counts as not different.
    """

    def weight(arm: Arm) -> tuple[bool, float]:
        found = arm.comparison(key)
        return arm.id == arm.baseline, abs(found.relative) if found is not None else -1.0

    kept = {arm.id for arm in sorted(arms, key=weight, reverse=True)[:most]}
    return [arm for arm in arms if arm.id in kept]


@dataclass(frozen=True)
class ChartRow:
    """One arm in a bar chart or a forest plot.

    Attributes:
        interval: Its number; None if it was not measured.
        text: The number as text, or why it is missing.
        kind: Of a forest plot: "shown", "not shown", "one seed" or "exact".
        under: Label of the baseline, where the chart has several.
    """

    arm: Arm
    interval: Interval | None
    text: str
    emulated: bool
    is_baseline: bool = False
    kind: str = "shown"
    under: str = ""


@dataclass(frozen=True)
class RowChart:
    """A bar chart or a forest plot: one row per arm. `hidden` of `total` arms are left out.

    Attributes:
        limit: A line to compare with, and its label.
        linear_to: Of a forest plot: the axis is linear up to this difference and logarithmic beyond it.
    """

    metric: Metric
    axis: Axis
    rows: list[ChartRow]
    total: int
    limit: tuple[float, str] | None = None
    linear_to: float | None = None

    @property
    def hidden(self) -> int:
        """Number of arms that are left out."""
        return self.total - len(self.rows)

    @property
    def clipped(self) -> bool:
        """True if an interval continues beyond the axis."""
        return any(r.interval and (r.interval.clipped_low or r.interval.clipped_high) for r in self.rows)


def bar_chart(
    arms: Sequence[Arm], key: str, most: int | None = None, limit: tuple[float, str] | None = None
) -> RowChart | None:
    """Return one metric of every arm. None if no arm has it.

    `limit` is a line in the shown unit with its label; it is dropped if the bars would be too short beside it.
    """
    metric, measured = metric_named(key), measured_arms(arms, key)
    if not measured:
        return None
    kept = most_different(arms, key, most)
    estimates = [found for arm in kept if (found := arm.estimate(key)) is not None]
    low, high = axis_range([Estimate(0.0, None, None, 1), *estimates])  # bars begin at 0
    window = (low * metric.scale, high * metric.scale)
    rows = []
    for arm in kept:
        found = arm.estimate(key)
        rows.append(
            ChartRow(
                arm,
                None if found is None else interval(found, window, metric.scale),
                study_text.reason_missing(arm) if found is None else metric.text(found.mean),
                arm.emulated and key in SPEED_AND_POWER,
                arm.id == arm.baseline,
            )
        )
    ends = [row.interval.high for row in rows if row.interval is not None]
    if limit is not None and limit[0] > MAX_REACH * max(ends):
        limit = None
    right = 1.3 * max([*ends, *([limit[0]] if limit else [])])
    axis = Axis(metric.heading, (1.3 * min(0.0, *ends), right), better=metric.better)
    return RowChart(metric, axis, rows, len(arms), limit)


def forest_chart(results: Results, arms: Sequence[Arm], key: str, most: int | None = None) -> RowChart | None:
    """Return relative differences from the baseline in percent, by baseline, the best quality first.

    None if no arm could be compared.
    """
    metric = metric_named(key)
    compared = [arm for arm in arms if arm.id != arm.baseline]
    kept = most_different(compared, key, most)
    found = {arm.id: one for arm in kept if (one := _finite_comparison(arm, key)) is not None}
    if not found:
        return None
    middles = [100 * one.relative for one in found.values()]
    ends = [
        100 * end
        for one in found.values()
        for end in (number(one.relative_low), number(one.relative_high))
        if end is not None
    ]
    limit = difference_limit(middles, ends)
    typical = statistics.median(abs(middle) for middle in middles)
    # One arm far away would press all others onto the zero line.
    outlier = max(abs(middle) for middle in middles) > 12 * typical > 0 and len(found) >= 3
    digits = percent_digits(max((abs(one.relative) for one in found.values()), default=0.0))
    blocks = by_baseline(kept)
    rows = []
    for base, members in blocks:
        named = results.arm(base)
        under = f"against {named.label if named else base}" if len(blocks) > 1 else ""
        for arm in sorted(members, key=_by_quality):
            emulated, one = arm.emulated and key in SPEED_AND_POWER, found.get(arm.id)
            if one is None:
                rows.append(ChartRow(arm, None, study_text.reason_missing(arm), emulated, under=under))
                continue
            shown = interval(
                Estimate(one.relative, one.relative_low, one.relative_high, one.n), (-limit, limit), 100
            )
            text = percent(one.relative, digits, signed=True)
            rows.append(ChartRow(arm, shown, text, emulated, kind=_kind(one), under=under))
    axis = Axis(f"difference in {metric.label} (%)", (-limit, limit), better=metric.better)
    return RowChart(metric, axis, rows, len(compared), linear_to=2 * typical if outlier else None)


def _finite_comparison(arm: Arm, key: str) -> Comparison | None:
    found = arm.comparison(key)
    return found if found is not None and number(found.relative) is not None else None


def _by_quality(arm: Arm) -> tuple[bool, float]:
    found = _finite_comparison(arm, QUALITY)
    return found is None, found.relative if found else 0.0


def _kind(found: Comparison) -> str:
    if found.verdict == "exact":
        return "exact"
    if number(found.relative_low) is None:
        return "one seed"
    return "not shown" if found.verdict == NO_DIFFERENCE else "shown"


@dataclass(frozen=True)
class ScatterPoint:
    """One arm in a scatter chart. `number` is its place in the list of arms; `size` is relative to the largest."""

    arm: Arm
    number: int
    x: Interval
    y: Interval
    size: float
    on_front: bool
    unclear: bool


@dataclass(frozen=True)
class ScatterChart:
    """Two metrics of arms against each other.

    `staircase` joins the arms of a front in these two metrics: between two of them nothing was tried, so the line has
    steps. `hidden` arms are left out.
    """

    x: Axis
    y: Axis
    points: list[ScatterPoint]
    staircase: list[tuple[float, float]]
    total: int

    @property
    def hidden(self) -> int:
        """Number of arms that are left out."""
        return self.total - len(self.points)

    @property
    def clipped(self) -> bool:
        """True if an interval continues beyond an axis."""
        return any(one.clipped_low or one.clipped_high for point in self.points for one in (point.x, point.y))


def scatter_chart(
    arms: Sequence[Arm],
    across: str,
    up: str,
    fronts: Sequence[Front] = (),
    size: str = "parameters",
    most: int | None = None,
) -> ScatterChart | None:
    """Return two metrics against each other, with the size of a mark by a third. None if no arm has both.

    The arms of `fronts` are always kept.
    """
    able = [arm for arm in measured_arms(arms, across) if arm.estimate(up) is not None]
    if not able:
        return None
    members = {name for front in fronts for name in front.arms}
    unclear = {name for front in fronts for name in front.unclear}
    others = [arm for arm in able if arm.id not in members]
    room = None if most is None else max(0, most - (len(able) - len(others)))
    shown = {arm.id for arm in most_different(others, across, room)} | members
    kept = [arm for arm in able if arm.id in shown]
    numbers = {arm.id: place for place, arm in enumerate(arms, start=1)}
    sizes = {arm.id: found.mean if (found := arm.estimate(size)) else 0.0 for arm in kept}
    largest = max(sizes.values()) or 1.0
    x, y = _metric_axis(kept, across), _metric_axis(kept, up)
    points = [
        ScatterPoint(
            arm,
            numbers[arm.id],
            interval(arm.estimates[across], x.range, metric_named(across).scale),
            interval(arm.estimates[up], y.range, metric_named(up).scale),
            sizes[arm.id] / largest,
            arm.id in members,
            arm.id in unclear,
        )
        for arm in kept
    ]
    exact = len(fronts) == 1 and set(fronts[0].metrics) == {across, up}
    staircase = sorted((p.x.mean, p.y.mean) for p in points if p.on_front) if exact else []
    return ScatterChart(x, y, points, staircase, len(able))


def _metric_axis(arms: Sequence[Arm], key: str) -> Axis:
    metric, found = metric_named(key), [arm.estimates[key] for arm in arms]
    log = needs_log(found)
    start, stop = axis_range(found, log)
    better = {"lower": " (less is better)", "higher": " (more is better)"}.get(metric.better or "", "")
    window = (start * metric.scale, stop * metric.scale)
    return Axis(metric.heading + better, window, log, metric.better)


def front_axes(front: Front) -> tuple[str, str]:
    """Return the two metrics that a front is drawn in, across and up."""
    up = QUALITY if QUALITY in front.metrics else front.metrics[-1]
    others = [key for key in front.metrics if key != up]
    return SPEED if SPEED in others else others[0], up


Curve = list[tuple[float, float]]
CURVE_TITLES = {
    "loss": "training loss, nats per token",
    "val_bpb": "validation loss, bits per byte",
    "tokens": "training tokens",
    "seconds": "training time",
}


def curve(rows: Sequence[Mapping[str, Any]], across: str, key: str) -> Curve:
    """Return the (across, key) points of a trial's curve that have both, in order."""
    points = [(number(row.get(across)), number(row.get(key))) for row in rows]
    return sorted((x, y) for x, y in points if x is not None and y is not None)
