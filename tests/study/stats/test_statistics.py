"""Intervals compared with scipy and with simulation; verdicts among many compared with scipy's rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.coverage import METHODS, NOISES, SEEDS, coverage, false_calls
from deskside.study.stats.statistics import mean_interval, significant

numbers = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda value: round(value, 3))


@given(st.lists(numbers, min_size=2, max_size=12).filter(lambda values: np.std(values) > 1e-2))
def test_the_interval_is_scipys(values: list[float]) -> None:
    found = mean_interval(values)
    wanted = stats.ttest_1samp(values, 0.0)
    low, high = wanted.confidence_interval(0.95)
    scale = max(abs(value) for value in values)
    assert found.n == len(values)
    assert (found.mean, found.low, found.high) == pytest.approx(
        (np.mean(values), low, high), rel=1e-9, abs=1e-9 * scale
    )
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-12)
    assert found.excludes_zero() == (low > 0 or high < 0)


@given(st.lists(numbers, min_size=1, max_size=8), st.randoms())
def test_the_order_of_the_numbers_changes_nothing(values: list[float], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert mean_interval(shuffled) == mean_interval(values)


def test_one_number_has_no_interval_and_none_is_an_error() -> None:
    alone = mean_interval([0.5])
    assert (alone.mean, alone.low, alone.high, alone.p, alone.n) == (0.5, None, None, None, 1)
    assert not alone.excludes_zero()
    with pytest.raises(ValueError, match="no numbers"):
        mean_interval([])


def test_a_spread_below_rounding_is_not_believed() -> None:
    noise = [1e-17, 2e-17, 1.5e-17]
    assert mean_interval(noise).excludes_zero() and not mean_interval(noise, rounding=1e-12).excludes_zero()
    assert mean_interval([0.0, 0.0]).p == 1.0 and mean_interval([0.1, 0.1]).p == 0.0
    assert mean_interval([0.1, 0.1, 0.1], rounding=1e-12).excludes_zero()


@given(st.lists(st.floats(0, 1), max_size=30))
def test_which_are_called_is_benjamini_and_hochbergs_rule(p_values: list[float]) -> None:
    wanted = stats.false_discovery_control(p_values, method="bh") <= 0.05 if p_values else []
    assert significant(p_values) == list(wanted)
    assert all(p <= 0.05 for p, called in zip(p_values, significant(p_values), strict=True) if called)


def covers_as_it_says(method: str, noise: str, seeds: int) -> bool:
    """Assert coverage within 3.5 standard errors of 95 % (2,500 studies: 1.5 points)."""
    share, _ = coverage(method, noise, seeds, 2500)
    return abs(share - 0.95) < 0.016


@pytest.mark.parametrize("noise", ["Gaussian", "one arm noisy", "baseline noisy"])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_cover_as_often_as_they_say(noise: str, seeds: int) -> None:
    assert covers_as_it_says("Student, paired (used)", noise, seeds)


@pytest.mark.parametrize(
    ("method", "noise"),
    [
        ("percentile bootstrap", "Gaussian"),
        ("studentised bootstrap", "Gaussian"),
        ("pooled over arms", "one arm noisy"),
        ("pooled over arms", "baseline noisy"),
        ("moderated", "one arm noisy"),
    ],
)
def test_the_same_check_finds_the_methods_that_do_not(method: str, noise: str) -> None:
    assert not covers_as_it_says(method, noise, 3)


@pytest.mark.full
@pytest.mark.parametrize("noise", NOISES)
def test_coverage_of_every_noise_at_every_number_of_seeds(noise: str) -> None:
    for seeds in SEEDS:
        share, width = coverage("Student, paired (used)", noise, seeds, 10_000)
        # A single arm with exponential noise is the worst case, because its differences are skewed.
        assert (0.91 if noise == "one arm skewed" else 0.94) < share < 0.975, (noise, seeds, share)
        if seeds >= 10:
            narrow = [coverage(name, noise, seeds, 1000)[1] for name in METHODS if "bootstrap" in name]
            assert width < 1.3 * min(narrow)


def test_twenty_arms_that_do_nothing_seldom_get_a_verdict() -> None:
    nothing = false_calls(arms=20, real=0, seeds=3, studies=500)
    assert nothing["any, used"] < 0.08 and nothing["any, each alone"] > 0.35
    some = false_calls(arms=20, real=10, seeds=5, studies=300)
    assert some["share, used"] < 0.05 and some["power, used"] > 0.95


def test_numbers_whose_squares_no_float_holds() -> None:
    """For example, the perplexity of a run that has gone wrong without becoming infinite."""
    plain, huge = mean_interval([1.0, 2.0, 4.0]), mean_interval([1e200, 2e200, 4e200])
    for name in ("mean", "low", "high"):
        assert getattr(huge, name) == pytest.approx(1e200 * getattr(plain, name))
    assert huge.p == pytest.approx(plain.p)
