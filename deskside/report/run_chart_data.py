"""Chart data of runs: which charts there are, and their lines, smoothed and thinned, without a plotting library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deskside.report.curve_data import Curve, curve

MAX_POINTS = 800  # of a drawn line, about as many as the pixels of a chart
FULL_RANGE = 2.5  # see `clipped_top`
TOP_SHARE = 0.98
MIN_POINTS_TO_CLIP = 20


@dataclass(frozen=True)
class RunChart:
    """A chart of one metric of runs.

    Attributes:
        key: Of the metric in metrics.jsonl.
        title: Of the chart.
        unit: Of the y axis, or "".
        noisy: True if it changes so much from step to step that it may be smoothed.
        from_zero: True if the y axis begins at zero.
        log: True if the y axis may be logarithmic.
        rare: True if few steps log the metric, so that each is drawn as a mark.
        objective: True if only preference training or training by rewards logs the metric.
    """

    key: str
    title: str
    unit: str = ""
    noisy: bool = True
    from_zero: bool = False
    log: bool = False
    rare: bool = False
    objective: bool = False


CHARTS = (
    RunChart("loss", "Training loss", "nats per token", log=True),
    RunChart("val_bpb", "Validation loss", "bits per byte", noisy=False, log=True, rare=True),
    RunChart(
        "val_accuracy",
        "Preference accuracy, held out",
        "share of pairs",
        noisy=False,
        rare=True,
        objective=True,
    ),
    RunChart("val_reward", "Mean reward, held out", noisy=False, rare=True, objective=True),
    RunChart("reward", "Mean reward of a step's answers", objective=True),
    RunChart("accuracy", "Preference accuracy of a step", "share of pairs", objective=True),
    RunChart("margin", "Margin between chosen and rejected answers", "implicit reward", objective=True),
    RunChart("entropy", "Entropy of the policy", "nats per token", objective=True),
    RunChart("answer_tokens", "Length of answers", "tokens", objective=True),
    RunChart("lr", "Learning rate", noisy=False, from_zero=True, log=True),
    RunChart("grad_norm", "Gradient norm", "before clipping", log=True),
    RunChart("tokens_per_second", "Speed", "tokens/s", from_zero=True),
    RunChart("memory_gib", "Peak memory", "GiB", noisy=False, from_zero=True),
    RunChart("watts", "Power of the GPU", "W", from_zero=True),
)


@dataclass(frozen=True)
class RunLine:
    """The line of one run in a chart.

    Attributes:
        points: (x, y), smoothed if asked, and thinned to `MAX_POINTS`.
        raw: The same before smoothing; empty if nothing was smoothed.
        final: (x, y) of the evaluation at the end of the run; None for other metrics.
        newest: The last logged value, without smoothing.
    """

    run: str
    points: Curve
    raw: Curve
    final: tuple[float, float] | None
    newest: float


def run_line(
    run: str,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    chart: RunChart,
    x_key: str,
    smoothing: float,
) -> RunLine | None:
    """Return the line of a run, or None if it logged nothing of the metric.

    Args:
        rows: Of metrics.jsonl.
        summary: summary.json, {} before the end.
        x_key: "step", "tokens" or "seconds".
        smoothing: Weight of the past in the moving average, 0 (none) to below 1.
    """
    points = curve(rows, x_key, chart.key)
    ends = curve([summary], {"step": "steps"}.get(x_key, x_key), chart.key) if chart.rare else []
    if not points and not ends:
        return None
    newest = [*points, *ends][-1][1]
    if not (chart.noisy and smoothing) or len(points) < 3:
        return RunLine(run, thinned(points), [], ends[0] if ends else None, newest)
    averages = smoothed([y for _, y in points], smoothing)
    average = [(x, y) for (x, _), y in zip(points, averages, strict=True)]
    return RunLine(run, thinned(average), thinned(points), None, newest)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of the values, without the bias towards 0 of its beginning.

    y_n = sum_i w^(n-i) x_i / sum_i w^(n-i), the debiasing of Adam (Kingma and Ba 2014, arXiv 1412.6980).
    """
    total = weights = 0.0
    averages = []
    for value in values:
        total, weights = weight * total + value, weight * weights + 1.0
        averages.append(total / weights)
    return averages


def thinned(points: Curve, most: int = MAX_POINTS) -> Curve:
    """Return at most `most` of the points: the ends, and the lowest and highest of each interval with its spikes."""
    if len(points) <= most:
        return points
    intervals = most // 2 - 1
    kept = [points[0]]
    for index in range(intervals):
        part = range(index * len(points) // intervals, (index + 1) * len(points) // intervals)
        extremes = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(extremes - {0, len(points) - 1})]
    return [*kept, points[-1]]


def clipped_top(values: Sequence[float]) -> float | None:
    """Return where a y axis should end so that the high losses of the first steps do not flatten the rest, or None.

    That is the case if the highest 2 % of the values make the axis more than 2.5 times as long.
    """
    if len(values) < MIN_POINTS_TO_CLIP:
        return None
    ordered = sorted(values)
    low, high, top = ordered[0], ordered[-1], ordered[int(TOP_SHARE * (len(ordered) - 1))]
    return top + 0.3 * (top - low) if high - low > FULL_RANGE * (top - low) > 0 else None
