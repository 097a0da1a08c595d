"""Chart data: what each chart of a study shows, independent of the plotting library.

The report (matplotlib, `charts.py`) and the dashboard (plotly, `dashboard/plotly_charts.py`) draw the same series,
intervals, labels, order and axis ranges, which are computed here. Numbers are in display units.

The means determine the range of an axis. With two seeds, an interval can be many times as wide as the differences
between the arms, so an interval that extends beyond the axis is clipped, and an arrow marks the clipped end.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from deskside.report import study_text
from deskside.report.study_text import by_baseline, measured_arms
from deskside.run.record import number
from deskside.study.metrics import QUALITY, SPEED, SPEED_AND_POWER, Metric, metric_named
from deskside.study.results import NO_DIFFERENCE, Arm, Comparison, Estimate, Front, Results
from deskside.utils.format import percent, percent_digits

# To show intervals, an axis extends beyond the means by up to this fraction of the span of the means, or by the median
# distance between a mean and an end of its interval if that is larger.
MAX_EXTENSION = 0.5
MARGIN = 0.12  # free space at both ends of an axis, as a fraction of the span of the means
MAX_RATIO = 3.0  # an axis extends to at most this multiple of its largest value to show intervals or a line
LOG_RATIO = 8  # an axis is logarithmic if the largest mean is more than this many times the smallest
CLIPPED = "An arrow is an interval that continues beyond the plot."
Range = tuple[float, float]
# Multiples of powers of ten, and how many ticks make them enough for an axis.
TICK_FACTORS = (((1,), 4), ((1, 3), 4), ((1, 2, 5), 3), ((1, 1.5, 2, 3, 5, 7), 3), (range(1, 10), 0))
MIN_TICKS = 3


@dataclass(frozen=True)
class Interval:
    """A mean and the part of its interval that lies within the axis range.

    `clipped_low` and `clipped_high` are True if the interval continues beyond the axis. `text` is the whole interval.
    """

    mean: float
    low: float
    high: float
    clipped_low: bool = False
    clipped_high: bool = False
    text: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis: title, range in display units, scale, and which direction is better ("lower", "higher" or None)."""

    title: str
    range: Range
    log: bool = False
    better: str | None = None


def to_interval(estimate: Estimate, limits: Range = (-math.inf, math.inf), scale: float = 1.0) -> Interval:
    """Return an estimate multiplied by `scale`, with its interval clipped to `limits` (in the scaled unit).

    Without an interval, `low` and `high` are the mean.
    """
    mean = estimate.mean * scale
    low, high = (
        mean if end is None else end * scale for end in (number(estimate.low), number(estimate.high))
    )
    return Interval(
        mean,
        max(low, limits[0]),
        min(high, limits[1]),
        low < limits[0],
        high > limits[1],
        f"{low:,.4g} to {high:,.4g}",
    )


def needs_log(estimates: Sequence[Estimate]) -> bool:
    """Return True if the means are so far apart that they need a logarithmic axis."""
    means = [estimate.mean for estimate in estimates]
    return min(means) > 0 and max(means) > LOG_RATIO * min(means)


def axis_range(estimates: Sequence[Estimate], log: bool = False) -> Range:
    """Return the (start, stop) of an axis for these estimates, in their unit. With `log`, all means must be > 0."""

    def to_axis(value: float) -> float:
        if not log:
            return value
        return math.log10(value) if value > 0 else -math.inf

    means = [to_axis(estimate.mean) for estimate in estimates]
    smallest, largest = min(means), max(means)
    ends = [
        (to_axis(end), to_axis(estimate.mean))
        for estimate in estimates
        for end in (number(estimate.low), number(estimate.high))
        if end is not None
    ]
    half_width = statistics.median([abs(end - mean) for end, mean in ends]) if ends else 0.0
    half_width = half_width if math.isfinite(half_width) else 0.0
    span = (largest - smallest) or 2 * half_width or abs(smallest) / 10 or 1.0
    max_extension = max(MAX_EXTENSION * span, half_width)
    below = smallest - min([smallest, *(end for end, _ in ends)])
    above = max([largest, *(end for end, _ in ends)]) - largest
    start = smallest - min(below, max_extension) - MARGIN * span
    stop = largest + min(above, max_extension) + MARGIN * span
    if log:
        return 10**start, 10**stop
    return (max(start, 0.0) if min(means) > 0 else start), stop


def log_ticks(axis_range: Range) -> list[float]:
    """Return three to eight ticks of a logarithmic axis: 1, 2, 5 or the like times powers of ten.

    Of a short axis, such as one from 1.1 to 1.9, they are round numbers at equal distances.
    """
    start, stop = axis_range
    powers = range(math.floor(math.log10(start)), math.ceil(math.log10(stop)) + 1)
    for factors, enough in TICK_FACTORS:
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        shown = [tick for tick in ticks if start <= tick <= stop]
        if len(shown) >= enough:
            break
    if len(shown) < MIN_TICKS:
        power = 10.0 ** math.floor(math.log10((stop - start) / MIN_TICKS))
        step = max(part * power for part in (1, 2, 5) if MIN_TICKS * part * power <= stop - start)
        shown = [step * n for n in range(math.ceil(start / step), math.floor(stop / step) + 1)]
    return shown[:: math.ceil(len(shown) / 8) or 1]


def symmetric_log_ticks(threshold: float, end: float) -> list[float]:
    """Return ticks of an axis from -end to end that is linear up to the threshold: 0 and at most two powers of ten
    on each side, so that their labels do not meet."""
    powers = range(math.ceil(math.log10(threshold)), math.floor(math.log10(end)) + 1)
    ticks = [10.0**power for power in sorted({powers[0], powers[-1]} if powers else ())] or [
        float(f"{end / 1.5:.0e}")
    ]
    return [*(-tick for tick in reversed(ticks)), 0.0, *ticks]


def difference_half_range(means: Sequence[float], ends: Sequence[float]) -> float:
    """Return how far an axis of relative differences extends to each side of zero.

    `means` are the differences (at least one), and `ends` are the ends of their intervals.
    """
    largest_mean = max(abs(mean) for mean in means)
    furthest_end = max((abs(end) for end in ends), default=0.0)
    shown = max(largest_mean, min(furthest_end, MAX_RATIO * largest_mean or 1.0))
    return (1.0 + MARGIN) * shown or 1.0


def most_different(arms: Sequence[Arm], key: str, max_arms: int | None) -> list[Arm]:
    """Return at most `max_arms` arms in their original order: baselines, and those that differ most from them.

    Differences are those in metric `key`. Arms without a comparison are left out first. None returns all arms.
    """

    def rank(arm: Arm) -> tuple[bool, float]:
        comparison = arm.comparison(key)
        return arm.id == arm.baseline, abs(comparison.relative) if comparison is not None else -1.0

    chosen = {arm.id for arm in sorted(arms, key=rank, reverse=True)[:max_arms]}
    return [arm for arm in arms if arm.id in chosen]


@dataclass(frozen=True)
class ChartRow:
    """One arm in a bar chart or a forest plot.

    Attributes:
        interval: The number to draw; None if it was not measured.
        text: The number as text, or why it is missing.
        kind: In a forest plot, "shown" or "not shown" (the difference), "one seed" or "exact".
        heading: Text above the rows of one baseline in a forest plot that has several baselines; else empty.
    """

    arm: Arm
    interval: Interval | None
    text: str
    emulated: bool
    is_baseline: bool = False
    kind: str = "shown"
    heading: str = ""


@dataclass(frozen=True)
class RowChart:
    """A bar chart or a forest plot with one row per arm.

    Attributes:
        total: Number of arms, including those that are left out.
        limit: Position and label of a reference line.
        linear_threshold: In a forest plot, the axis is linear up to this difference and logarithmic beyond it.
    """

    metric: Metric
    axis: Axis
    rows: list[ChartRow]
    total: int
    limit: tuple[float, str] | None = None
    linear_threshold: float | None = None

    @property
    def hidden(self) -> int:
        """Number of arms that are left out."""
        return self.total - len(self.rows)

    @property
    def clipped(self) -> bool:
        """True if an interval continues beyond the axis."""
        return any(r.interval and (r.interval.clipped_low or r.interval.clipped_high) for r in self.rows)


def bar_chart(
    arms: Sequence[Arm], key: str, max_arms: int | None = None, limit: tuple[float, str] | None = None
) -> RowChart | None:
    """Return a bar chart of one metric, or None if it was measured in no arm. Other arms are left out first.

    `limit` is the position (in display units) and label of a reference line. The line is left out if the bars would be
    too short beside it.
    """
    metric, measured = metric_named(key), measured_arms(arms, key)
    if not measured:
        return None
    chosen = most_different(measured, key, max_arms)
    room = None if max_arms is None else max_arms - len(chosen)
    chosen += most_different([arm for arm in arms if arm not in measured], key, room)
    shown = [arm for arm in arms if arm in chosen]
    estimates = [estimate for arm in shown if (estimate := arm.estimate(key)) is not None]
    low, high = axis_range([Estimate(0.0, None, None, 1), *estimates])  # bars begin at 0
    limits = (low * metric.scale, high * metric.scale)
    rows = []
    for arm in shown:
        estimate = arm.estimate(key)
        rows.append(
            ChartRow(
                arm,
                None if estimate is None else to_interval(estimate, limits, metric.scale),
                study_text.reason_missing(arm) if estimate is None else metric.text(estimate.mean),
                arm.emulated and key in SPEED_AND_POWER,
                arm.id == arm.baseline,
            )
        )
    ends = [row.interval.high for row in rows if row.interval is not None]
    if limit is not None and limit[0] > MAX_RATIO * max(ends):
        limit = None
    left, right = 1.3 * min(0.0, *ends), 1.3 * max(0.0, *ends, *([limit[0]] if limit else []))
    axis = Axis(metric.heading, (left, right if right > left else 1.0), better=metric.better)
    return RowChart(metric, axis, rows, len(arms), limit)


def forest_chart(
    results: Results, arms: Sequence[Arm], key: str, max_arms: int | None = None
) -> RowChart | None:
    """Return a forest plot of relative differences from the baseline in percent, or None if no arm was compared.

    Rows are grouped by baseline, and the best quality is first. The arms may be those of several groups.
    """
    metric = metric_named(key)
    compared = [arm for arm in arms if arm.id != arm.baseline]
    shown = most_different(compared, key, max_arms)
    comparisons = {
        arm.id: comparison for arm in shown if (comparison := _finite_comparison(arm, key)) is not None
    }
    if not comparisons:
        return None
    means = [100 * comparison.relative for comparison in comparisons.values()]
    ends = [
        100 * end
        for comparison in comparisons.values()
        for end in (number(comparison.relative_low), number(comparison.relative_high))
        if end is not None
    ]
    half_range = difference_half_range(means, ends)
    typical = statistics.median(abs(mean) for mean in means)
    # A single outlier would squeeze all others onto the zero line.
    outlier = max(abs(mean) for mean in means) > 12 * typical > 0 and len(comparisons) >= 3
    digits = percent_digits(
        max((abs(comparison.relative) for comparison in comparisons.values()), default=0.0)
    )
    baseline_groups = by_baseline(shown)
    group_headings = {group.name: group.heading for group in results.groups}
    several_groups = len({arm.group for arm in arms}) > 1
    rows: list[ChartRow] = []
    for baseline, members in baseline_groups:
        baseline_arm = results.arm(baseline)
        heading = (
            f"against {baseline_arm.label if baseline_arm else baseline}" if len(baseline_groups) > 1 else ""
        )
        group = members[0].group
        if several_groups and not any(row.arm.group == group for row in rows):
            alone = len({arm.baseline for arm in shown if arm.group == group}) == 1
            name = group_headings.get(group, group)
            heading = name if alone else f"{name}: {baseline_arm.label if baseline_arm else baseline}"
        for arm in sorted(members, key=_by_quality):
            emulated, comparison = arm.emulated and key in SPEED_AND_POWER, comparisons.get(arm.id)
            if comparison is None:
                rows.append(ChartRow(arm, None, study_text.reason_missing(arm), emulated, heading=heading))
                continue
            estimate = Estimate(
                comparison.relative, comparison.relative_low, comparison.relative_high, comparison.n
            )
            interval = to_interval(estimate, (-half_range, half_range), scale=100)
            own_digits = percent_digits(comparison.relative) if outlier else digits
            text = percent(comparison.relative, own_digits, signed=True)
            rows.append(ChartRow(arm, interval, text, emulated, kind=_kind(comparison), heading=heading))
    axis = Axis(f"difference in {metric.label} (%)", (-half_range, half_range), better=metric.better)
    return RowChart(metric, axis, rows, len(compared), linear_threshold=2 * typical if outlier else None)


def _finite_comparison(arm: Arm, key: str) -> Comparison | None:
    comparison = arm.comparison(key)
    return comparison if comparison is not None and number(comparison.relative) is not None else None


def _by_quality(arm: Arm) -> tuple[bool, float]:
    comparison = _finite_comparison(arm, QUALITY)
    return comparison is None, comparison.relative if comparison else 0.0


def _kind(comparison: Comparison) -> str:
    if comparison.verdict == "exact":
        return "exact"
    if number(comparison.relative_low) is None:
        return "one seed"
    return "not shown" if comparison.verdict == NO_DIFFERENCE else "shown"


@dataclass(frozen=True)
class ScatterPoint:
    """One arm in a scatter chart.

    Attributes:
        number: Position in the list of arms, from 1.
        size: Value of the size metric relative to the largest, 0 to 1.
        on_front, unclear: True if the arm is on a Pareto front, or may be on it.
    """

    arm: Arm
    number: int
    x: Interval
    y: Interval
    size: float
    on_front: bool
    unclear: bool


@dataclass(frozen=True)
class ScatterChart:
    """Two metrics of arms plotted against each other.

    Attributes:
        staircase: Points of the Pareto front in exactly these two metrics, sorted by x. They are joined by steps,
            because nothing was measured between two neighbors.
        total: Number of arms with both metrics, including those that are left out.
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
        return any(
            interval.clipped_low or interval.clipped_high
            for point in self.points
            for interval in (point.x, point.y)
        )


def scatter_chart(
    arms: Sequence[Arm],
    x_key: str,
    y_key: str,
    fronts: Sequence[Front] = (),
    size_key: str = "parameters",
    max_arms: int | None = None,
) -> ScatterChart | None:
    """Return two metrics against each other, with mark sizes from a third metric. None if no arm has the first two.

    Arms on `fronts` are never left out.
    """
    measured = [arm for arm in measured_arms(arms, x_key) if arm.estimate(y_key) is not None]
    if not measured:
        return None
    on_front = {name for front in fronts for name in front.arms}
    unclear = {name for front in fronts for name in front.unclear}
    others = [arm for arm in measured if arm.id not in on_front]
    max_others = None if max_arms is None else max(0, max_arms - (len(measured) - len(others)))
    shown_ids = {arm.id for arm in most_different(others, x_key, max_others)} | on_front
    shown = [arm for arm in measured if arm.id in shown_ids]
    numbers = {arm.id: position for position, arm in enumerate(arms, start=1)}
    sizes = {arm.id: estimate.mean if (estimate := arm.estimate(size_key)) else 0.0 for arm in shown}
    largest = max(sizes.values()) or 1.0
    x, y = _metric_axis(shown, x_key), _metric_axis(shown, y_key)
    points = [
        ScatterPoint(
            arm,
            numbers[arm.id],
            to_interval(arm.estimates[x_key], x.range, metric_named(x_key).scale),
            to_interval(arm.estimates[y_key], y.range, metric_named(y_key).scale),
            sizes[arm.id] / largest,
            arm.id in on_front,
            arm.id in unclear,
        )
        for arm in shown
    ]
    exact = len(fronts) == 1 and set(fronts[0].metrics) == {x_key, y_key}
    staircase = sorted((point.x.mean, point.y.mean) for point in points if point.on_front) if exact else []
    return ScatterChart(x, y, points, staircase, len(measured))


def _metric_axis(arms: Sequence[Arm], key: str) -> Axis:
    metric, estimates = metric_named(key), [arm.estimates[key] for arm in arms]
    log = needs_log(estimates)
    start, stop = axis_range(estimates, log)
    better = {"lower": " (less is better)", "higher": " (more is better)"}.get(metric.better or "", "")
    limits = (start * metric.scale, stop * metric.scale)
    return Axis(metric.heading + better, limits, log, metric.better)


def front_axes(front: Front) -> tuple[str, str]:
    """Return the metrics of the x axis and the y axis on which a front is drawn."""
    y_key = QUALITY if QUALITY in front.metrics else front.metrics[-1]
    others = [key for key in front.metrics if key != y_key]
    return SPEED if SPEED in others else others[0], y_key
