"""Differences between two models: equal to scipy's and statsmodels' where
they have them, and the interval's coverage.
"""

import numpy as np
import pytest
from scipy import stats

from deskside.evaluate.paired import score_difference, verdict_difference


def test_mcnemar_of_a_known_table() -> None:
    """101 items are right in both, 59 only in the second, 121 only in the first, 33
    in neither. R's binom.test gives this p.
    """
    first = [True] * 101 + [False] * 59 + [True] * 121 + [False] * 33
    second = [True] * 160 + [False] * 154
    found = verdict_difference(first, second)
    assert found.difference == pytest.approx((121 - 59) / 314)
    assert found.p == pytest.approx(2 * stats.binom.cdf(59, 180, 0.5), rel=1e-9)
    assert found.low is not None and found.high is not None and 0 < found.low < found.difference < found.high


def test_equal_verdicts_are_not_certain() -> None:
    found = verdict_difference([True] * 20, [True] * 20)
    assert (found.difference, found.p) == (0.0, 1.0)
    assert found.low == pytest.approx(-found.high) and 0.05 < found.high < 0.25


CASES = [(50, 0.5, 0.1, 0.1), (200, 0.3, 0.15, 0.05), (400, 0.85, 0.05, 0.02)]


@pytest.mark.parametrize(("n", "both", "first_only", "second_only"), CASES)
def test_coverage(n: int, both: float, first_only: float, second_only: float) -> None:
    """95 % intervals contain the true difference in 94 to 98 % of 2000 draws."""
    rng = np.random.default_rng(0)
    tables = rng.multinomial(
        n, [both, first_only, second_only, 1 - both - first_only - second_only], size=2000
    )
    true, hits = first_only - second_only, 0
    for a, b, c, d in tables:
        first = [True] * (a + b) + [False] * (c + d)
        second = [True] * a + [False] * b + [True] * c + [False] * d
        found = verdict_difference(first, second)
        hits += found.low <= true <= found.high
    assert 0.94 < hits / 2000 < 0.98


def test_scores_are_compared_by_student() -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(40, 10, 60)
    b = a + rng.normal(-1, 3, 60)
    found = score_difference(a.tolist(), b.tolist())
    theirs = stats.ttest_rel(a, b)
    assert (found.p, found.difference) == (pytest.approx(theirs.pvalue), pytest.approx((a - b).mean()))
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval()))
    assert score_difference([1.0], [2.0]).p is None and score_difference([1.0, 3.0], [2.0, 4.0]).low is None
