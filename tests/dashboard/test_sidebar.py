"""The sidebar's filters."""

from dataclasses import replace
from pathlib import Path

import pytest

from deskside.dashboard.sidebar import Filters, StudySelection, select
from deskside.study.results import Group
from deskside.study.stats.compare import compare
from tests.study import made

WHOLE = compare(made.results())


def names(picked: Filters) -> set[str]:
    return {arm.id for arm in select(WHOLE, picked).arms}


def test_no_filter_leaves_everything() -> None:
    assert select(WHOLE, Filters()) == WHOLE


def test_levels_narrow_together() -> None:
    assert names(Filters(levels={"size": frozenset({"small"}), "fp4": frozenset({"off"})})) == {
        "small-gqa_off-fp4_off",
        "small-gqa_on-fp4_off",
    }


def test_status_finds_arms_with_such_a_trial() -> None:
    assert names(Filters(statuses=frozenset({"oom"}))) == {"medium-gqa_off-fp4_on"}
    assert len(names(Filters(statuses=frozenset({"finished"})))) == 8


def test_words_are_looked_for_in_the_label_alone() -> None:
    assert names(Filters(search="MEDIUM gqa on")) == {"medium-gqa_on-fp4_off", "medium-gqa_on-fp4_on"}
    assert names(Filters(search="no such")) == set()
    hidden = replace(WHOLE, arms=[replace(arm, id=f"fp8-{arm.id}") for arm in WHOLE.arms])
    assert select(hidden, Filters(search="FP8")).arms == []


def test_a_factor_that_a_group_does_not_vary_hides_none_of_its_arms() -> None:
    other = replace(WHOLE.arms[0], id="other", label="other", group="second", levels={"optimizer": "muon"})
    groups = [*WHOLE.groups, Group("second", "", "124m", "full", "", [], [])]
    both = replace(WHOLE, arms=[*WHOLE.arms, other], groups=groups)
    left = select(both, Filters(levels={"size": frozenset({"small"})}))
    assert [arm.id for arm in left.arms if arm.group == "second"] == ["other"]
    assert [arm.id for arm in select(both, Filters(groups=frozenset({"second"}))).arms] == ["other"]
    assert [group.name for group in select(both, Filters(search="small")).groups] == ["main"]
    assert [group.name for group in select(both, Filters(groups=frozenset({"second"}))).groups] == ["second"]


def test_fronts_keep_only_what_is_shown() -> None:
    left = select(WHOLE, Filters(levels={"size": frozenset({"small"})}))
    shown = {arm.id for arm in left.arms}
    assert left.fronts and all(set(front.arms) <= shown for front in left.fronts)


def test_interactions_are_those_of_the_arms_that_are_left() -> None:
    assert WHOLE.interactions
    left = select(WHOLE, Filters(levels={"gqa": frozenset({"off"})}))
    assert all("gqa" not in found.levels for found in left.interactions)


def test_fewer_seeds_are_compared_anew() -> None:
    left = select(WHOLE, Filters(seeds=frozenset({1, 2})))
    assert left.seeds == [1, 2]
    arm = left.arm("small-gqa_on-fp4_off")
    assert arm is not None and {trial.seed for trial in arm.trials} == {1, 2}
    speeds = [trial.metrics["tokens_per_second"] for trial in arm.trials]
    assert arm.estimates["tokens_per_second"].mean == pytest.approx(sum(speeds) / 2)
    assert {found.n for found in arm.comparisons} == {2}
    one = select(WHOLE, Filters(seeds=frozenset({3}))).arm("small-gqa_on-fp4_off")
    assert one is not None and one.estimates["val_bpb"].low is None


def test_all_seeds_are_no_filter() -> None:
    assert select(WHOLE, Filters(seeds=frozenset({1, 2, 3}))) == WHOLE


def test_a_group_is_shown_as_if_there_were_no_other() -> None:
    second = [
        replace(arm, id=f"b-{arm.id}", group="b", baseline=f"b-{arm.baseline}") for arm in made.results().arms
    ]
    groups = [*WHOLE.groups, replace(WHOLE.groups[0], name="b", title="A second")]
    both = compare(replace(made.results(), groups=groups, arms=[*made.results().arms, *second]))
    narrowed = select(both, Filters(levels={"size": frozenset({"small"})}))
    one = StudySelection("s", Path(), narrowed, both).of_group("b")
    assert {arm.group for arm in one.results.arms} == {"b"} and len(one.results.arms) == 4
    assert one.hidden == 4  # of its own arms, not those of other groups
    assert [group.name for group in one.results.groups] == ["b"]
    assert one.results.fronts and {front.group for front in one.results.fronts} == {"b"}
    assert one.results.interactions and {found.group for found in one.results.interactions} == {"b"}
