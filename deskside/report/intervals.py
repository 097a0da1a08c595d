"""How far an axis reaches: it follows the means. An interval that goes on beyond it is cut there, and marked as cut.

With two seeds an interval may be many times as wide as everything that is to be compared; drawn whole, one such arm
presses all others onto one spot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from deskside.run.record import number
from deskside.study.results import Estimate

REACH = 0.5  # parts of the means' span that an axis follows intervals beyond them, or their usual width if that is more
EDGE = 0.12  # parts of the span left free at either end
WIDEST = 3.0  # relative differences: an interval is drawn to this many times the largest of them
WIDE = 8  # means that lie further apart than this factor stand on a logarithmic axis
CUT = "An arrow is an interval that goes on beyond the plot."


@dataclass(frozen=True)
class Cut:
    """What is drawn of an estimate: its interval inside of the axis, and at which ends it goes on."""

    low: float
    high: float
    goes_on_below: bool
    goes_on_above: bool


def wide(found: Sequence[Estimate]) -> bool:
    """Whether these means need a logarithmic axis."""
    means = [one.mean for one in found]
    return min(means) > 0 and max(means) > WIDE * min(means)


def window(found: Sequence[Estimate], log: bool = False) -> tuple[float, float]:
    """Where the axis of these estimates begins and ends, in their unit. log: it is logarithmic; all means are > 0."""

    def place(value: float) -> float:
        return value if not log else math.log10(value) if value > 0 else -math.inf

    means = [place(one.mean) for one in found]
    first, last = min(means), max(means)
    lows = [place(low) for one in found if (low := number(one.low)) is not None]
    highs = [place(high) for one in found if (high := number(one.high)) is not None]
    widths = [
        place(end) - place(one.mean)
        for one in found
        for end in (number(one.low), number(one.high))
        if end is not None
    ]
    usual = median([abs(width) for width in widths]) if widths else 0.0
    usual = usual if math.isfinite(usual) else 0.0
    span = (last - first) or 2 * usual or abs(first) / 10 or 1.0
    most = max(REACH * span, usual)
    down, up = first - min([first, *lows]), max([last, *highs]) - last
    start = first - min(down, most) - EDGE * span
    end = last + min(up, most) + EDGE * span
    if log:
        return 10**start, 10**end
    return (max(start, 0.0) if min(means) > 0 else start), end


def cut(found: Estimate, axis: tuple[float, float]) -> Cut:
    """What of an estimate's interval lies inside of an axis; one without an interval is its mean alone."""
    low, high = (found.mean if bound is None else bound for bound in (number(found.low), number(found.high)))
    return Cut(max(low, axis[0]), min(high, axis[1]), low < axis[0], high > axis[1])


def reach(middles: Sequence[float], ends: Sequence[float]) -> float:
    """How far an axis of relative differences goes to both sides of zero, in their unit.

    middles: the differences, at least one; ends: of their intervals.
    """
    largest = max(abs(middle) for middle in middles)
    furthest = max((abs(end) for end in ends), default=0.0)
    return 1.12 * max(largest, min(furthest, WIDEST * largest or 1.0)) or 1.0
