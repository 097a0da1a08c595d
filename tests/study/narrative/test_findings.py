"""Sentences: the right words with their intervals, and nothing that the comparison does not show."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.study.narrative.findings import GOALS, describe, findings_by_group, insights, unfinished
from deskside.study.results import Arm, Comparison, Results
from deskside.study.stats.compare import compare
from tests.study.made import results as made
from tests.study.small import arm, crossed, study

BASE = Comparison(
    "tokens_per_second", "small-mha", 3, 1.0, 0.9, 1.1, 0.123, 0.119, 0.127, "paired t", "higher"
)


def say(emulated: bool = False, budget: str = "100M tokens", **changed: object) -> str:
    comparison = dataclasses.replace(BASE, **changed)  # type: ignore[arg-type]
    base = Arm("small-mha", "small, MHA", "main", {}, "small-mha")
    other = Arm("small-gqa", "small, GQA", "main", {}, "small-mha", emulated, comparisons=[comparison])
    results = study([base, other])
    groups = [dataclasses.replace(results.groups[0], budget=budget)]
    return describe(comparison, other, dataclasses.replace(results, groups=groups))


def turned(relative: float, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"relative": relative, "relative_low": low, "relative_high": high}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, "12.3 % faster than MHA (11.9 to 12.7 %, 3 seeds)"),
        (
            {**turned(-0.123, -0.127, -0.119), "verdict": "lower"},
            "12.3 % slower than MHA (11.9 to 12.7 %, 3 seeds)",
        ),
        (
            {"metric": "val_bpb", **turned(0.0005, -0.003, 0.004), "verdict": "no difference shown"},
            "no difference shown in validation loss against MHA (-0.30 to +0.40 %, 3 seeds)",
        ),
        (
            {"metric": "val_bpb", **turned(-0.0052, -0.0061, -0.0043), "verdict": "lower"},
            "0.52 % lower validation loss than MHA (0.43 to 0.61 %, 3 seeds)",
        ),
        (
            {"metric": "peak_memory_gib", **turned(-0.1, -0.1, -0.1), "verdict": "exact"},
            "exactly 10 % less peak memory than MHA (the same in all 3 seeds)",
        ),
        (
            {"metric": "parameters", **turned(0.0, 0.0, 0.0), "verdict": "exact", "n": 1},
            "exactly the same parameters as MHA (1 seed)",
        ),
        (
            {**turned(0.2, None, None), "verdict": "too few seeds", "n": 1},
            "20.0 % faster than MHA (1 seed, so no interval)",
        ),
        (
            {"metric": "val_bpb", **turned(0.01, 0.001, 0.02), "verdict": "no difference shown"},
            "no difference shown in validation loss against MHA "
            "(+0.10 to +2.00 %, 3 seeds; not enough for a verdict among 1 comparisons)",
        ),
        ({"metric": "a_new_number"}, "12.3 % higher a new number than MHA (11.9 to 12.7 %, 3 seeds)"),
        ({**turned(14.2, 13.0, 15.5)}, "1,420 % faster than MHA (1,300 to 1,550 %, 3 seeds)"),
    ],
)  # fmt: skip
def test_a_comparison_in_words(changed: dict[str, object], wanted: str) -> None:
    assert say(**changed) == wanted  # type: ignore[arg-type]


def test_the_speed_of_an_emulated_format_says_so() -> None:
    assert "emulated here" in say(emulated=True) and "emulated" not in say()
    assert "emulated" not in say(emulated=True, metric="peak_memory_gib")
    assert "emulated" not in say(emulated=True, metric="val_bpb")
    assert "fewer tokens" in say(emulated=True, metric="val_bpb", budget="4 minutes of training")


@given(
    st.floats(-0.99, 30).filter(lambda v: v == 0 or abs(v) > 1e-6), st.floats(0, 0.5), st.integers(2, 9),
    st.sampled_from(["val_bpb", "tokens_per_second", "peak_memory_gib", "steps"]),
)  # fmt: skip
def test_what_is_not_shown_is_never_said_to_be_so(size: float, half: float, n: int, metric: str) -> None:
    low, high = size - half, size + half
    verdict = "higher" if low > 0 else "lower" if high < 0 else "no difference shown"
    said = say(metric=metric, n=n, verdict=verdict, **turned(size, low, high))  # type: ignore[arg-type]
    assert ("no difference shown" in said) == (verdict == "no difference shown") and f"{n} seeds" in said
    # A number has a sign only where the words do not give the direction.
    assert bool(re.search(r"\([-+\d]", said)) and (verdict == "no difference shown" or "-" not in said)


@pytest.mark.parametrize("goal", GOALS)
def test_insights_of_the_made_up_study(goal: str) -> None:
    results = compare(made(seeds=6))
    said = insights(results, goal)
    assert len(said) == len(set(said)) and said[0].startswith("On a card that was made up, ")
    assert all(one.endswith(".") and "\n" not in one for one in said)
    told = [one for one in said if "%" in one or "no difference" in one]
    assert told and all(re.search(r"\d seeds?[);]|both seeds\)", one) for one in told)
    slower = [one for one in said if "slower" in one and "FP4 on:" in one]
    assert all("emulated here" in one for one in slower)
    assert "1 out of memory, 1 diverged" in said[-1]


def test_insights_name_the_known_effects() -> None:
    results = compare(made(seeds=6))
    speed = " ".join(insights(results, "speed"))
    assert re.search(r"small, GQA on, FP4 off: (9\.\d|10\.\d) % faster than GQA off", speed)
    assert "fastest: small, GQA on, FP4 off" in speed
    assert re.search(r"small, GQA off, FP4 on: (19\.\d|20\.\d) % slower than FP4 off", speed)
    assert "exactly 10 % less peak memory than GQA off" in " ".join(insights(results, "memory"))


def test_nothing_is_said_before_a_trial_has_ended_and_one_seed_is_called_so() -> None:
    assert insights(compare(study([arm("base", [None]), arm("other", [None])])), "quality") == []
    said = insights(compare(study([arm("base", [1.0]), arm("other", [1.1])])), "quality")
    assert "One seed has no interval" in said[0] and "no interval" in said[1]
    assert insights(compare(made(gpu=False)), "energy")[0].startswith("energy was not measured")
    with pytest.raises(KeyError):
        insights(made(), "beauty")


def test_why_a_group_has_no_number() -> None:
    results = made()
    empty = [dataclasses.replace(one, id=f"x{one.id}", group="x", trials=[]) for one in results.arms]
    groups = [*results.groups, dataclasses.replace(results.groups[0], name="x")]
    both = compare(dataclasses.replace(results, groups=groups, arms=[*results.arms, *empty]))
    assert findings_by_group(both, "energy")[1][1] == ["energy was not measured (no trial has finished)."]
    assert "a CPU does not" in insights(compare(made(gpu=False)), "energy")[0]


def test_the_best_arm_is_not_said_to_be_alone_where_it_is_not() -> None:
    close = study(
        [arm("base", [1.0, 1.1, 1.2]), arm("twin", [1.01, 1.09, 1.21]), arm("far", [2.0, 2.1, 2.2])]
    )
    first = insights(compare(close), "quality")[0]
    assert "lowest validation loss: base" in first and "Not significantly different from it: “twin”." in first


def test_an_interaction_is_told_with_its_interval() -> None:
    numbers = {
        ("off", "off"): [1.0, 1.01, 1.02], ("on", "off"): [0.9, 0.91, 0.915], ("off", "on"): [0.9, 0.908, 0.919],
        ("on", "on"): [0.9, 0.91, 0.917],
    }  # fmt: skip
    results = compare(crossed(numbers, ("a", "b")))  # type: ignore[arg-type]
    told = [one for one in insights(results, "quality") if "together" in one]
    assert len(told) == 1
    assert re.fullmatch(
        r"a on and b on together: \d+\.\d % higher validation loss than from both alone "
        r"\(\d+\.\d to \d+\.\d %, 3 seeds\)\.",
        told[0],
    )


def test_many_arms_are_not_all_named() -> None:
    draw = [1.0, 1.02, 1.01, 1.03]
    arms = [arm("base", draw)]
    arms += [arm(f"bad{n}", [value * (1.2 + n / 50) for value in draw[1:] + draw[:1]]) for n in range(12)]
    arms += [arm(f"same{n}", draw[n % 3 :] + draw[: n % 3]) for n in range(1, 12)]
    said = insights(compare(study(arms)), "quality")
    assert len(said) < 12 and any("and 5 more" in one for one in said)


def test_many_arms_of_one_seed_are_not_said_to_be_shown() -> None:
    arms = [arm("base", [1.0])]
    arms += [arm(f"a{n}", [1 - n / 50]) for n in range(1, 6)] + [
        arm(f"b{n}", [1 + n / 50]) for n in range(1, 6)
    ]
    said = insights(compare(study(arms)), "quality")
    rest = [one for one in said if "too: " in one]
    assert [one.split(" than")[0] for one in rest] == [
        f"With one seed, so not shown, {word}" for word in ("better", "worse")
    ]
    several = [replace_seeds(one) for one in arms]
    shown = [one for one in insights(compare(study(several)), "quality") if "too: " in one]
    assert [one.split(" than")[0] for one in shown] == ["Better", "Worse"]


def replace_seeds(one: Arm) -> Arm:
    """Return the arm with four seeds that hardly differ."""
    first = one.trials[0].metrics["val_bpb"]
    return arm(one.id, [first, first * 1.0001, first * 1.0002, first * 0.9999])


def test_several_groups_are_told_apart() -> None:
    first, second = made(), made()
    arms = [
        dataclasses.replace(one, id=f"b-{one.id}", baseline=f"b-{one.baseline}", group="b")
        for one in second.arms
    ]
    groups = [first.groups[0], dataclasses.replace(first.groups[0], name="b", title="Again")]
    results: Results = compare(dataclasses.replace(first, groups=groups, arms=first.arms + arms))
    said = insights(results, "speed")
    assert said[0].startswith("main: ") and any(one.startswith("Again: ") for one in said)


def test_by_group_says_the_same_without_the_titles() -> None:
    one = made()
    second = [
        dataclasses.replace(arm, id=f"b-{arm.id}", group="b", baseline=f"b-{arm.baseline}")
        for arm in one.arms
    ]
    groups = [*one.groups, dataclasses.replace(one.groups[0], name="b", title="A second")]
    both = compare(dataclasses.replace(one, groups=groups, arms=[*one.arms, *second]))
    told = findings_by_group(both, "speed")
    assert [group.name for group, _ in told] == [group.name for group in groups]
    assert all("A second" not in line for _, lines in told for line in lines)
    flat = [f"{group.title or group.name}: {line}" for group, lines in told for line in lines]
    assert insights(both, "speed") == flat + unfinished(both)
    assert insights(compare(one), "speed") == told[0][1] + unfinished(compare(one))
