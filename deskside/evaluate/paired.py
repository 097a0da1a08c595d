"""Difference of two models on the same items, with an interval that uses the pairing.

Two models mostly fail on the same items, so the difference is known better than the separate intervals suggest.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deskside.evaluate.scoring import Z


@dataclass(frozen=True)
class PairedDifference:
    """Mean scores of two models on `n` items, their difference (first minus second) and its 95 % interval.

    p: two-sided p-value of no difference. None where there are too few items for it.
    """

    n: int
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    p: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def verdict_difference(first: Sequence[bool], second: Sequence[bool]) -> PairedDifference:
    """Return the difference of two accuracies.

    The interval adds one item that each model alone answers right, so it is not empty if the verdicts agree (Bonett and
    Price 2012, J. of Educational and Behavioral Statistics 37). The test is McNemar's exact one.
    """
    from scipy.stats import binomtest

    n = len(first)
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    p1, p2 = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = Z * math.sqrt((p1 + p2 - (p1 - p2) ** 2) / (n + 2))
    differing = only_first + only_second
    p = float(binomtest(only_first, differing).pvalue) if differing else 1.0
    low, high = max(-1.0, p1 - p2 - half), min(1.0, p1 - p2 + half)
    return PairedDifference(n, sum(first) / n, sum(second) / n, (only_first - only_second) / n, low, high, p)


def score_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Return the difference of two mean scores, with Student's interval and test of the items' differences."""
    from scipy.stats import ttest_rel

    n = len(first)
    means = math.fsum(first) / n, math.fsum(second) / n
    if n < 2 or len({a - b for a, b in zip(first, second, strict=True)}) == 1:
        return PairedDifference(n, *means, means[0] - means[1], None, None, None)
    test = ttest_rel(first, second)
    low, high = map(float, test.confidence_interval())
    return PairedDifference(n, *means, means[0] - means[1], low, high, float(test.pvalue))
