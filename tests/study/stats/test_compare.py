"""Comparisons, checked with scipy, numpy and the known effects of a synthetic study."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from deskside.study.metrics import METRICS
from deskside.study.results import Arm, Comparison, Results, from_json
from deskside.study.stats.compare import compare
from tests.study.made import results as made
from tests.study.small import arm, study

positive = st.floats(0.1, 10.0).map(lambda value: round(value, 4))
tables = st.integers(1, 5).flatmap(
    lambda seeds: st.lists(
        st.lists(st.one_of(positive, st.none()), min_size=seeds, max_size=seeds), min_size=2, max_size=5
    )
)


def built(rows: list[list[float | None]]) -> Results:
    return study([arm("base", rows[0]), *(arm(f"arm{n}", row) for n, row in enumerate(rows[1:]))])


def of(results: Results, name: str, metric: str = "val_bpb") -> Comparison:
    found = results.arm(name)
    assert found is not None
    return next(c for c in found.comparisons if c.metric == metric)


def test_a_difference_is_scipys_paired_interval() -> None:
    ours, theirs = [1.31, 1.29, 1.335, 1.302], [1.30, 1.285, 1.31, 1.299]
    found = of(compare(built([theirs, ours])), "arm0")  # type: ignore[list-item]
    units = stats.ttest_rel(ours, theirs)
    assert (found.difference, found.low, found.high) == pytest.approx(
        (np.mean(ours) - np.mean(theirs), *units.confidence_interval(0.95)), abs=1e-12
    )
    logs = stats.ttest_rel(np.log(ours), np.log(theirs))
    ends = np.expm1(logs.confidence_interval(0.95))
    assert (found.relative_low, found.relative_high) == pytest.approx(tuple(ends), abs=1e-12)
    assert found.relative == pytest.approx(stats.gmean(ours) / stats.gmean(theirs) - 1)
    assert found.method == "paired t" and found.n == 4
    assert found.verdict == ("higher" if logs.pvalue < 0.05 else "no difference shown")


def test_estimates_are_means_with_scipys_interval() -> None:
    values = [2.0, 2.5, 2.25]
    estimate = compare(built([values, [2.0, None, 2.0]])).arms[0].estimates["val_bpb"]  # type: ignore[list-item]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (estimate.mean, estimate.low, estimate.high, estimate.n) == pytest.approx((2.25, low, high, 3))
    wide = compare(built([[1.0, 9.0], [1.0, 1.0]])).arms[0].estimates["val_bpb"]
    assert wide.low == 0.0  # and not below it
    alone = compare(built([[1.0], [1.0]])).arms[0].estimates["val_bpb"]
    assert (alone.mean, alone.low, alone.high) == (1.0, None, None)


def test_known_effects_are_recovered() -> None:
    whole = compare(made(seeds=12, noise=0.001))
    for size in ("small", "medium"):
        gqa, fp4 = f"{size}-gqa_on-fp4_off", f"{size}-gqa_off-fp4_on"
        wanted = {
            (gqa, "val_bpb"): 0.005, (gqa, "tokens_per_second"): 0.1, (fp4, "val_bpb"): 0.01,
            (fp4, "tokens_per_second"): -0.2,
        }  # fmt: skip
        for (name, metric), effect in wanted.items():
            found = of(whole, name, metric)
            assert found.relative == pytest.approx(effect, abs=0.004)
            assert found.verdict == ("higher" if effect > 0 else "lower")
        memory = of(whole, gqa, "peak_memory_gib")
        assert memory.verdict == "exact" and memory.relative == memory.relative_low == pytest.approx(-0.1)
        assert of(whole, fp4, "peak_memory_gib").difference == 0


def test_known_intervals_cover_known_effects_through_the_whole_comparison() -> None:
    """Tests the complete path of a study, not only the function: 1,000 studies of three
    seeds, of which the first lacks a trial.
    """
    draw = random.Random(5)
    covered = 0
    for _ in range(1000):
        common = [draw.gauss(0, 0.02) for _ in range(4)]
        base = [1.3 * math.exp(shift + draw.gauss(0, 0.004)) for shift in common]
        ours: list[float | None] = [1.01 * 1.3 * math.exp(shift + draw.gauss(0, 0.01)) for shift in common]
        ours[draw.randrange(4)] = None
        found = of(compare(built([base, ours])), "arm0")  # type: ignore[list-item]
        assert found.n == 3 and found.relative_low is not None and found.relative_high is not None
        covered += found.relative_low <= 0.01 <= found.relative_high
    assert 925 <= covered <= 975  # 3.6 standard errors


def test_what_failed_in_one_arm_is_left_out_of_both() -> None:
    whole = compare(built([[1.0, 1.1, 1.2, None], [1.1, None, 1.35, 9.9]]))
    pairs = compare(built([[1.0, 1.2], [1.1, 1.35]]))
    assert of(whole, "arm0") == of(pairs, "arm0")
    none = compare(built([[1.0, None], [None, 1.0]]))
    assert none.arms[1].comparisons == []


def test_one_seed_is_too_few_but_decides_what_no_seed_changes() -> None:
    whole = compare(
        study(
            [
                arm("base", [1.0]), arm("other", [1.2]),
                arm("big", [2e6], "parameters"), arm("bigger", [3e6], "parameters", baseline="big"),
            ]
        )
    )  # fmt: skip
    found = of(whole, "other")
    assert (found.verdict, found.method, found.low, found.relative_low) == (
        "too few seeds",
        "one seed",
        None,
        None,
    )
    assert found.relative == pytest.approx(0.2) and found.difference == pytest.approx(0.2)
    assert of(whole, "bigger", "parameters").verdict == "exact"


def test_a_metric_that_is_zero_somewhere_or_no_number_is_not_compared() -> None:
    whole = compare(study([arm("base", [0.0, 0.0], "mfu"), arm("other", [0.4, 0.5], "mfu")]))
    assert whole.arms[1].comparisons == [] and whole.arms[1].estimates["mfu"].mean == pytest.approx(0.45)
    whole = compare(built([[1.0, math.nan, 1.1], [1.2, 1.2, math.inf]]))
    assert of(whole, "arm0").n == 1


def test_a_verdict_has_to_stand_among_all_arms() -> None:
    """One arm with p = 0.03, alone and among nineteen others: the interval is the same, but the verdict is not."""
    draw = np.random.default_rng(0)
    base = np.ones(5)
    noise = [0.3, -0.2, 0.1, -0.4, 0.2]
    t = stats.t.ppf(1 - 0.015, 4)
    logs = np.array(noise) - np.mean(noise) + t * stats.sem(noise)
    rows = [base, np.exp(0.01 * logs)]
    others = [np.exp(0.01 * (draw.permutation(noise) - np.mean(noise) + 0.01)) for _ in range(19)]
    alone = of(compare(built([list(row) for row in rows])), "arm0")
    among = of(compare(built([list(row) for row in rows + others])), "arm0")
    assert alone.verdict == "higher" and among.verdict == "no difference shown"
    assert (
        dataclasses.replace(among, verdict="higher") == alone
        and alone.relative_low
        and alone.relative_low > 0
    )


@given(tables, st.randoms(use_true_random=False))
def test_the_order_of_trials_changes_nothing(rows: list[list[float | None]], shuffle: random.Random) -> None:
    whole = built(rows)
    mixed = []
    for one in whole.arms:
        trials = list(one.trials)
        shuffle.shuffle(trials)
        mixed.append(dataclasses.replace(one, trials=trials))
    first, second = compare(whole), compare(dataclasses.replace(whole, arms=mixed))
    for one, other in zip(first.arms, second.arms, strict=True):
        assert (one.estimates, one.comparisons) == (other.estimates, other.comparisons)
    assert (first.fronts, first.interactions) == (second.fronts, second.interactions)


@given(tables, st.integers(-6, 6))
def test_a_change_of_unit_changes_the_difference_and_nothing_else(
    rows: list[list[float | None]], power: int
) -> None:
    scale = 2.0**power
    scaled = [[None if number is None else number * scale for number in row] for row in rows]
    for one, other in zip(compare(built(rows)).arms, compare(built(scaled)).arms, strict=True):
        for c, d in zip(one.comparisons, other.comparisons, strict=True):
            assert d.difference == pytest.approx(c.difference * scale, rel=1e-6, abs=1e-9 * scale)
            assert (d.relative, d.n) == (pytest.approx(c.relative, rel=1e-6, abs=1e-9), c.n)
            decided = (
                c.relative_low is not None and min(abs(c.relative_low), abs(c.relative_high or 0)) > 1e-6
            )
            assert d.verdict == c.verdict or not decided


@given(tables)
def test_arms_that_are_the_same_never_differ(rows: list[list[float | None]]) -> None:
    whole = compare(built([rows[0]] * len(rows)))
    for one in whole.arms:
        for found in one.comparisons:
            assert found.relative == 0 and found.verdict in ("no difference shown", "exact", "too few seeds")


@given(tables)
def test_a_verdict_and_its_interval_agree(rows: list[list[float | None]]) -> None:
    for one in compare(built(rows)).arms:
        for c in one.comparisons:
            if c.verdict in ("higher", "lower"):
                assert c.relative_low is not None and c.relative_high is not None
                assert c.relative_low > 0 if c.verdict == "higher" else c.relative_high < 0
            if c.relative_low is not None and c.relative_high is not None:
                assert c.relative_low <= c.relative <= c.relative_high


def test_comparing_twice_is_comparing_once_and_survives_json() -> None:
    whole = compare(made())
    assert compare(whole) == whole
    assert from_json(whole.to_json()) == whole
    assert list(whole.arms[0].estimates) == [
        metric.key for metric in METRICS if metric.key in whole.arms[0].estimates
    ]


def test_a_study_without_trials_or_with_a_lost_baseline_is_compared_as_far_as_it_goes() -> None:
    empty = compare(study([Arm("base", "base", "main", {}, "base")]))
    assert empty.arms[0].estimates == {} and empty.fronts == [] and empty.interactions == []
    lost = compare(study([arm("other", [1.0, 1.1], baseline="gone")]))
    assert lost.arms[0].comparisons == [] and lost.arms[0].estimates["val_bpb"].n == 2
