"""Plans for texts of any size: epochs are bounded, and forecasts outside the loss law's range are honest."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deskside.budget.loss import MAX_WEIGHTS_PER_TOKEN, TYPICAL_TEXT, USEFUL_EPOCHS, TextBaselines
from deskside.budget.scaling import decay_for_epochs
from deskside.plan.candidates import models
from deskside.plan.own_corpus import too_large
from deskside.plan.planner import make_plan
from deskside.plan.result import Plan
from deskside.plan.run_length import most_tokens
from deskside.utils.errors import UsageError
from tests.plan import made
from tests.plan.made import ask

STRANGE = TextBaselines(unigram=2.026, gzip=1.865)  # a text of 230,000 tokens; a trained demo model had 1.386


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


uniques = logarithmic(1e4, 1e11).map(int)
hours = logarithmic(0.01, 1000)
texts = st.sampled_from([TYPICAL_TEXT, STRANGE, TextBaselines(3.5, 3.1), TextBaselines(1.2)])


def planned(unique: int | None, of_hours: float, **options: object) -> Plan:
    return make_plan(made.request(value=of_hours, unique_tokens=unique, **options))


@settings(max_examples=15)
@given(uniques, hours, st.booleans(), texts)
@example(59_874, 1.0, False, TYPICAL_TEXT)  # even the smallest model has too many weights
@example(59_874, 1.0, True, TYPICAL_TEXT)
def test_any_text_in_any_time(unique: int, of_hours: float, own_corpus: bool, text: TextBaselines) -> None:
    plan = planned(unique, of_hours, own_corpus=own_corpus, text=text)
    if plan.best is None:
        assert plan.verdict == "no" and plan.reason_texts()
        return
    smallest = next(models(plan.request))
    for band in plan.bands:
        candidate = band.candidate
        assert 0 < candidate.tokens[0] <= candidate.tokens[1] <= candidate.tokens[2]
        assert candidate.tokens[2] <= max(USEFUL_EPOCHS * unique, candidate.setting.tokens_per_step)
        assert 0 < candidate.seconds[0] <= candidate.seconds[1] <= candidate.seconds[2] <= of_hours * 3600
        assert 0 < band.loss[0] < band.loss[1] < band.loss[2] <= text.ceiling
        assert band.loss[2] / band.loss[0] > 1.1
        is_smallest = candidate.shape.preset == smallest.preset
        assert candidate.weights <= MAX_WEIGHTS_PER_TOKEN * unique or is_smallest
        epochs = candidate.tokens[1] / unique
        assert decay_for_epochs(epochs, 4) <= USEFUL_EPOCHS / 4
    best = plan.best.candidate
    if best.weights > MAX_WEIGHTS_PER_TOKEN * unique:
        said = " ".join(plan.reason_texts("text"))
        assert too_large(best.weights) in said and "are left out" not in said
    if best.forecast != best.loss:
        assert "rough guess" in " ".join(plan.reason_texts("text"))


@settings(max_examples=8)
@given(uniques, logarithmic(0.01, 100), st.floats(1.1, 10), texts)
def test_more_hours_are_never_worse(unique: int, of_hours: float, more: float, text: TextBaselines) -> None:
    short, long = (planned(unique, value, text=text).best for value in (of_hours, more * of_hours))
    if short is not None:
        assert long is not None and long.loss[1] <= short.loss[1] * (1 + 1e-3)


def test_the_text_of_a_stranger() -> None:
    """The plan once read it 800,000 times, for 3.93 bits per byte."""
    plan = make_plan(ask(gpu="rtx4090", hours=24, unique_tokens="230k", text=STRANGE))
    best = plan.to_json()["bands"][0]
    assert best["epochs"] <= USEFUL_EPOCHS and best["ends_early"] and best["loss"]["bound"] == 2.026
    assert best["loss"]["low"] < 1.386 < best["loss"]["expected"] < 1.865 < best["loss"]["high"] < 2.026
    assert len(best["loss"]["outside_measured"]) == 4
    assert best["time"]["pretraining_seconds"]["expected"] < 300 and plan.hours["pretraining"] < 0.1
    assert best["config"]["schedule"]["length"] == "9.2M tokens"
    assert "too small for this time" in " ".join(plan.reason_texts("text"))


def test_tokens_of_the_user_stay_with_a_warning() -> None:
    plan = make_plan(ask(gpu="rtx4090", tokens="1B", unique_tokens="230k"))
    assert plan.best is not None and plan.best.candidate.tokens[1] == 1e9
    assert f"{USEFUL_EPOCHS} times is worth nothing" in " ".join(plan.reason_texts("text"))


@pytest.mark.parametrize("budget", [{"flops": 1e19}, {"preset": "124m"}])
def test_other_budgets_end_early_too(budget: dict[str, object]) -> None:
    plan = make_plan(ask(gpu="rtx4090", unique_tokens="230k", **budget))
    assert plan.best is not None
    best = plan.best.candidate
    assert best.tokens[1] == most_tokens(plan.request, best.setting) < 1e8
    assert "too small" in " ".join(plan.reason_texts("text"))


def test_a_loss_out_of_reach() -> None:
    assert make_plan(ask(gpu="rtx4090", loss=1.0, unique_tokens="230k")).verdict == "no"
    with pytest.raises(UsageError, match=r"2\.026"):
        ask(gpu="rtx4090", loss=2.1, text=STRANGE)
