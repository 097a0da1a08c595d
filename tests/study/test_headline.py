"""The headline of a group: the best mean, and the comparison's verdict."""

from dataclasses import replace

import pytest
from scipy import stats

from deskside.dashboard.run_table import study_row
from deskside.study.metrics import metric_named
from deskside.study.narrative.findings import insights
from deskside.study.narrative.headline import headlines
from deskside.study.results import Arm, Results, Trial
from deskside.study.stats.compare import compare
from tests.study import made

WHOLE = compare(made.results())


def with_means(values: dict[str, list[float]], key: str = "val_bpb") -> Results:
    """Return one group of arms with these values by seed; the first is the baseline."""
    baseline = next(iter(values))
    arms = [
        Arm(
            name, name, "main", {}, baseline, trials=[_trial(seed, key, v) for seed, v in enumerate(seeds, 1)]
        )
        for name, seeds in values.items()
    ]
    return compare(replace(made.results(), arms=arms))


def _trial(seed: int, key: str, value: float) -> Trial:
    return made.trial(seed, {"tokens": 1000.0, "seconds": 1.0, "val_bpb": 1.0, key: value})


@pytest.mark.parametrize("key", ["val_bpb", "tokens_per_second", "peak_memory_gib", "joules_per_token"])
def test_the_best_has_the_best_mean_of_its_family(key: str) -> None:
    metric = metric_named(key)
    found = headlines(WHOLE, WHOLE.groups[0], metric)
    assert [headline.baseline.levels["size"] for headline in found] == ["small", "medium"]
    choose = max if metric.better == "higher" else min
    for headline in found:
        family = [arm for arm in WHOLE.arms if arm.baseline == headline.baseline.id]
        means = {arm.id: sum(t.metrics[key] for t in arm.finished()) / len(arm.finished()) for arm in family}
        assert headline.best.id == choose(means, key=lambda name: means[name])


@pytest.mark.parametrize("last", [0.9, 1.0, 1.1])
def test_terminal_report_and_dashboard_name_the_same_arm(last: float) -> None:
    """Where the means are equal, it is the first arm of the study."""
    results, group, metric = one({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [last] * 3})
    best = "c" if last < 1 else "a"
    (found,) = headlines(results, group, metric)
    assert found.best.id == best
    assert f": {best}, " in insights(results, "quality")[0]
    assert f"best: {best}" in study_row(results, "made").details


def test_a_clear_difference_is_shown() -> None:
    (found,) = headlines(*one({"a": [1.0, 1.01, 1.03], "b": [0.9, 0.91, 0.92]}))
    assert (found.best.id, found.outcome, found.undecided) == ("b", "shown", ())
    assert stats.ttest_rel([1.0, 1.01, 1.03], [0.9, 0.91, 0.92]).pvalue < 0.05


def test_a_difference_within_the_noise_is_not_shown() -> None:
    (found,) = headlines(*one({"a": [1.0, 1.2, 1.1], "b": [1.1, 1.0, 1.15]}))
    assert (found.best.id, found.outcome, found.reason) == ("b", "not shown", "the interval includes zero")
    assert [arm.id for arm in found.undecided] == ["a"]


def test_an_interval_without_zero_is_not_enough_among_many() -> None:
    values = {"a": [1.0, 1.0, 1.0], "b": [0.99, 0.985, 0.98]}
    assert headlines(*one(values))[0].outcome == "shown"
    noise = {f"n{i}": [1.0 + 0.1 * s, 1.05 - 0.1 * s, 1.1 + i / 50] for i, s in enumerate((1, -1) * 5)}
    (found,) = headlines(*one(values | noise))
    assert (found.best.id, found.outcome) == ("b", "not shown") and "11 comparisons" in found.reason


def test_the_baseline_can_be_the_best() -> None:
    (found,) = headlines(*one({"a": [0.9, 0.91, 0.92], "b": [1.0, 1.01, 1.02], "c": [1.1, 1.111, 1.12]}))
    assert (found.best.id, found.outcome) == ("a", "shown") and "next best is b" in found.difference
    noisy = {"a": [0.9, 0.91, 0.92], "b": [1.0, 1.01, 1.02], "c": [0.7, 1.3, 1.2]}
    (found,) = headlines(*one(noisy))
    assert (found.best.id, found.outcome) == ("a", "not shown") and [a.id for a in found.undecided] == ["c"]


def test_one_seed_one_arm_and_equal_values() -> None:
    assert headlines(*one({"a": [1.0], "b": [0.9]}))[0].outcome == "one seed"
    alone = headlines(*one({"a": [1.0, 1.1]}))[0]
    assert (alone.outcome, alone.difference) == ("alone", "")
    same = headlines(*one({"a": [1.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0]}))[0]
    assert same.outcome == "the same"


def test_a_metric_without_a_better_direction_has_no_winner() -> None:
    with pytest.raises(ValueError, match="parameters"):
        headlines(WHOLE, WHOLE.groups[0], metric_named("parameters"))


def one(values: dict[str, list[float]]):  # type: ignore[no-untyped-def]
    results = with_means(values)
    return results, results.groups[0], metric_named("val_bpb")
