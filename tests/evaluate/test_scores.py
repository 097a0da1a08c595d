"""Intervals compared with scipy, centring by its definition, and the mean's interval compared with simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from deskside.evaluate.scoring import centred, mean_centred, wilson


@given(st.integers(1, 5000), st.floats(0, 1))
def test_wilson_is_scipys(n: int, share: float) -> None:
    right = round(share * n)
    expected = binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert wilson(right, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_centred() -> None:
    assert centred(0.25, 0.25) == 0
    assert centred(1.0, 0.62) == pytest.approx(1)
    assert centred(0.4, 0.25) == pytest.approx(0.2)
    assert centred(0.0, 0.5) == -1


def test_mean_covers_the_truth() -> None:
    """Over many draws of three tasks, the interval contains the true mean about 95 times in 100."""
    rng = np.random.default_rng(0)
    truth, n, chance = np.array([0.3, 0.6, 0.9]), np.array([200, 400, 100]), (0.25, 0.5, 0.0)
    mean = np.mean([centred(p, c) for p, c in zip(truth, chance, strict=True)])
    covered = 0
    for _ in range(1000):
        found = rng.binomial(n, truth) / n
        _, low, high = mean_centred([(float(a), int(k), c) for a, k, c in zip(found, n, chance, strict=True)])
        covered += low <= mean <= high
    assert 930 <= covered <= 970
    value, low, high = mean_centred([(0.0, 10, 0.0), (1.0, 10, 0.0)])
    assert value == 0.5 and low < 0.5 < high
