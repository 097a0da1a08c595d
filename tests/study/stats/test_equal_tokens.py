"""Loss at equal tokens compared with numpy's interpolation, and cases in which there is none."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.study.results import Arm, Trial
from deskside.study.stats.compare import compare
from deskside.study.stats.equal_tokens import KEY, common_tokens, loss_at, with_equal_tokens
from tests.study.made import results as made

points = st.dictionaries(st.integers(1, 10**9), st.floats(0.5, 3.0), min_size=1, max_size=8)


def trial(evaluations: dict[float, float], seed: int = 1, end: bool = True) -> Trial:
    """Return a trial whose curve has these evaluations, and rows without one between them."""
    curve: list[dict[str, float | None]] = []
    for tokens, loss in evaluations.items():
        curve += [{"tokens": tokens / 2, "val_bpb": None}, {"tokens": tokens, "val_bpb": loss}]
    last = max(evaluations)
    metrics = {"tokens": last, "val_bpb": evaluations[last]} if end else {}
    return Trial(seed, "finished", curve=curve, metrics=metrics)


def arm(name: str, *trials: Trial, baseline: str = "base") -> Arm:
    return Arm(name, name, "main", {}, baseline, trials=list(trials))


@given(points, st.floats(0.5, 2e9))
def test_between_evaluations_it_is_linear_in_the_logarithm(
    evaluations: dict[float, float], at: float
) -> None:
    found = loss_at(trial(evaluations), at)
    tokens = sorted(evaluations)
    if tokens[0] <= at <= tokens[-1]:
        wanted = np.interp(math.log(at), np.log(tokens), [evaluations[one] for one in tokens])
        assert found == pytest.approx(wanted, abs=1e-6)
    else:
        assert found is None


def test_it_is_taken_where_the_slowest_trial_with_the_same_baseline_stopped() -> None:
    fast = {100.0: 2.0, 400.0: 1.0}
    arms = [
        arm("base", trial(fast), trial(fast, 2)),
        arm("slow", trial({50.0: 2.5, 200.0: 1.5}), trial({50.0: 2.5, 220.0: 1.4}, 2)),
        arm("other", trial({10.0: 3.0, 20.0: 2.9}), baseline="other"),
        arm(
            "dead",
            Trial(1, "oom", metrics={"tokens": 1.0, "val_bpb": 9.0}, curve=[{"tokens": 1.0, "val_bpb": 9.0}]),
        ),
    ]
    assert common_tokens([one for one in arms if one.baseline == "base"]) == 200.0
    base, slow, other, dead = with_equal_tokens(arms)
    assert [one.metrics[KEY] for one in base.trials] == [pytest.approx(1.5)] * 2
    assert slow.trials[0].metrics[KEY] == 1.5 and 1.4 < slow.trials[1].metrics[KEY] < 1.5
    assert other.trials[0].metrics[KEY] == 2.9 and KEY not in dead.trials[0].metrics


def test_there_is_no_extrapolation_and_nothing_old_is_kept() -> None:
    early = arm("base", trial({50.0: 2.0}))
    late = arm("late", trial({100.0: 1.5, 200.0: 1.0}))
    stale = dataclasses.replace(late.trials[0], metrics={**late.trials[0].metrics, KEY: 0.1})
    found = with_equal_tokens([early, dataclasses.replace(late, trials=[stale])])
    assert found[0].trials[0].metrics[KEY] == 2.0 and KEY not in found[1].trials[0].metrics
    assert common_tokens([arm("none", Trial(1, "finished"))]) is None


def test_with_equal_tokens_it_is_the_loss_at_the_end() -> None:
    results = made()
    arms = [
        dataclasses.replace(
            one,
            trials=[
                dataclasses.replace(
                    t,
                    metrics={**t.metrics, "tokens": 1e8} if t.metrics else {},
                    curve=[{**row, "tokens": 1e8 * n / len(t.curve)} for n, row in enumerate(t.curve, 1)],
                )
                for t in one.trials
            ],
        )
        for one in results.arms
    ]
    for one in compare(dataclasses.replace(results, arms=arms)).arms:
        for t in one.finished():
            assert t.metrics[KEY] == t.metrics["val_bpb"]


def test_a_final_loss_of_other_text_is_no_point_of_the_curve() -> None:
    """All arms have 1.005 on the text of the evaluations and 1.000 on all the text, which only the end reads."""
    arms = []
    for name, last in (("base", 800.0), ("slow", 400.0)):
        found = trial({100.0: 1.005, last / 2: 1.005}, end=False)
        arms.append(arm(name, dataclasses.replace(found, metrics={"tokens": last, "val_bpb": 1.0})))
    assert {one.trials[0].metrics[KEY] for one in with_equal_tokens(arms)} == {1.005}


def test_a_curve_with_damaged_rows_is_read_as_far_as_it_goes() -> None:
    rows: list[dict[str, float | None]] = [
        {}, {"tokens": None, "val_bpb": 1.0}, {"tokens": 0.0, "val_bpb": 1.0}, {"tokens": 10.0, "val_bpb": math.nan},
        {"tokens": math.inf, "val_bpb": 1.0}, {"tokens": 20.0, "val_bpb": 1.25},
    ]  # fmt: skip
    assert loss_at(Trial(1, "finished", curve=rows), 20.0) == 1.25
    assert common_tokens([arm("base", Trial(1, "finished", curve=rows))]) == 20.0
