"""From factors to arms: none is lost, none occurs twice, each has a baseline, and the order favours none."""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deskside.config import merge, presets
from deskside.config.duration import Duration
from deskside.study.spec.expand import PlannedArm, expand, ordered_trials
from deskside.study.spec.parse_spec import load, parse, with_overrides
from deskside.study.spec.spec import ArmSpec, Budget, Exclusion, FactorSpec, GroupSpec, LevelSpec, StudySpec
from deskside.utils.errors import UsageError

# Values from 16 on are possible.
KEYS = ("checkpoint.keep", "guard.window", "data.prefetch", "guard.max_skips")


def leaf(key: str, value: int) -> dict[str, dict[str, int]]:
    part, name = key.split(".")
    return {part: {name: value}}


@st.composite
def studies(draw: st.DrawFn) -> StudySpec:
    sizes = draw(st.lists(st.integers(2, 4), min_size=0, max_size=len(KEYS)))
    factors = tuple(
        FactorSpec(
            name=f"f{i}",
            label=f"factor {i}",
            levels=tuple(
                LevelSpec(name=f"l{n}", label=f"{i}:{n}", set=leaf(KEYS[i], n + 16)) for n in range(size)
            ),
        )
        for i, size in enumerate(sizes)
    )
    within = tuple(f.name for f in factors if draw(st.booleans()))
    baseline = {f.name: draw(st.sampled_from(f.levels)).name for f in factors if f.name not in within}
    varied = [f for f in factors if f.name not in within]
    exclusions = []
    # Only levels other than the baseline are excluded, so that no arm loses its baseline.
    for factor in varied:
        others = [level.name for level in factor.levels if level.name != baseline[factor.name]]
        if draw(st.booleans()):
            exclusions.append(
                Exclusion(where={factor.name: (draw(st.sampled_from(others)),)}, why="not today")
            )
    group = GroupSpec(
        name="main",
        title="",
        base="demo",
        budget=Budget(Duration(12, "steps")),
        seeds=draw(st.integers(1, 4)),
        design=draw(st.sampled_from(["full", "one-at-a-time"])),
        factors=factors,
        within=within,
        baseline=baseline,
        set=(),
        arms=(ArmSpec(name="extra", label="by hand", set={"model": {"num_hidden_layers": 7}}),)
        if draw(st.booleans())
        else (),
        exclusions=tuple(exclusions),
    )
    return StudySpec(name=draw(st.sampled_from(["a", "b"])), groups=(group,))


@settings(max_examples=60, deadline=None)
@given(studies())
def test_counts_baselines_and_ids(study: StudySpec) -> None:
    (group,) = study.groups
    found = expand(study)
    names = [[(f.name, level.name) for level in f.levels] for f in group.factors]
    wanted = [dict(combination) for combination in itertools.product(*names)]
    if group.design == "one-at-a-time":
        wanted = [w for w in wanted if sum(w[k] != v for k, v in group.baseline.items()) <= 1]
    excluded = [
        w for w in wanted if any(all(w[k] in v for k, v in e.where.items()) for e in group.exclusions)
    ]
    kept = [w for w in wanted if w not in excluded]
    own = [arm for arm in found.arms if "arm" not in arm.levels]
    assert Counter(tuple(sorted(arm.levels.items())) for arm in own) == Counter(
        tuple(sorted(w.items())) for w in kept
    )
    assert len(found.excluded) == len(excluded)
    assert len(found.arms) == len(kept) + len(group.arms)
    assert len({arm.id for arm in found.arms}) == len(found.arms)
    by_id = {arm.id: arm for arm in found.arms}
    for arm in found.arms:
        base = by_id[arm.baseline]
        assert base.baseline == base.id
        assert all(base.levels[name] == level for name, level in group.baseline.items())
        if "arm" not in arm.levels:
            assert all(base.levels[name] == arm.levels[name] for name in group.within)
            assert (arm is base) == all(arm.levels[k] == v for k, v in group.baseline.items())
        for i, factor in enumerate(group.factors):
            part, name = KEYS[i].split(".")
            assert (
                getattr(getattr(arm.config, part), name)
                == factor.level(arm.levels[factor.name]).set[part][name]
            )


@settings(max_examples=40, deadline=None)
@given(studies())
def test_the_order_is_a_permutation_in_blocks(study: StudySpec) -> None:
    found = expand(study)
    order = ordered_trials(found.arms, found.seeds, study.name)
    seeds = study.groups[0].seeds
    assert Counter((arm.id, seed) for arm, seed in order) == Counter(
        (arm.id, seed) for arm in found.arms for seed in range(1, seeds + 1)
    )
    assert [seed for _, seed in order] == sorted(seed for _, seed in order)
    assert order == ordered_trials(list(reversed(found.arms)), found.seeds, study.name)
    # Omitting arms does not change the order of the rest.
    some = found.arms[::2]
    assert [(a, s) for a, s in order if a in some] == ordered_trials(some, found.seeds, study.name)


def test_the_order_differs_by_seed_and_by_study() -> None:
    found = expand(load("matrix16"), seeds=5)
    assert found.seeds == {"main": 5}
    order = ordered_trials(found.arms, found.seeds, "a")
    blocks = [[arm.id for arm, seed in order if seed == block] for block in range(1, 6)]
    assert len({tuple(block) for block in blocks}) == 5
    assert order != ordered_trials(found.arms, found.seeds, "b")


def test_no_place_in_the_block_is_an_arms_own() -> None:
    """Over many seeds, every arm is in the first half about half of the time."""
    arms = expand(load("matrix16")).arms
    order = ordered_trials(arms, {"main": 400}, "fair")
    place = Counter(arm.id for position, (arm, _) in enumerate(order) if position % 16 < 8)
    assert all(abs(place[arm.id] - 200) < 50 for arm in arms)  # five standard deviations


@settings(max_examples=40, deadline=None)
@given(studies(), st.data())
def test_a_filter_keeps_what_it_names_and_its_baselines(study: StudySpec, data: st.DataObject) -> None:
    (group,) = study.groups
    assume(group.factors)
    everything = expand(study).arms
    factor = data.draw(st.sampled_from(group.factors))
    level = data.draw(st.sampled_from(factor.levels)).name
    assume(any(arm.levels[factor.name] == level for arm in everything))
    kept = expand(study, only=[f"{factor.name}={level}"]).arms
    named = [arm for arm in everything if arm.levels[factor.name] == level]
    needed = {arm.id for arm in named} | {arm.baseline for arm in named}
    assert [arm.id for arm in kept] == [arm.id for arm in everything if arm.id in needed]


def test_filters() -> None:
    study = load("matrix16")

    def kept(*only: str) -> list[str]:
        return [arm.id for arm in expand(study, only=only).arms]

    assert kept("size=small,large", "fp4=off", "gqa=on") == [
        "size_small-gqa_off-fp4_off",
        "size_small-gqa_on-fp4_off",
        "size_large-gqa_off-fp4_off",
        "size_large-gqa_on-fp4_off",
    ]
    assert kept("size_small-gqa_off-fp4_off") == ["size_small-gqa_off-fp4_off"]
    assert len(kept("size_small-*")) == 4
    assert len(kept("size_small-*", "size_medium-*", "fp4=off")) == 4
    assert len(kept("main")) == 16
    groups = expand(load("precision"), only=["cache"])
    assert {arm.group for arm in groups.arms} == {"cache"}
    assert [group.name for group in groups.groups] == list(groups.seeds) == ["cache"]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["sise=small"], "--only sise: unknown factor; did you mean size?"),
        (["size=smal"], "--only size=smal: unknown level; did you mean small?"),
        (["mian"], "--only mian: unknown arm or group; did you mean main?"),
        (["size_small-*", "size=large"], "selects no arm"),
    ],
)
def test_filters_that_keep_nothing(only: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?").replace("*", r"\*")):
        expand(load("matrix16"), only=only)


def simple(*changes: tuple[str, str]) -> str:
    """Return the text of a study with two factors and an explicit arm."""
    text = """
name = "x"
base = "demo"
budget.tokens_per_arm = "1M"
[[factor]]
name = "depth"
[[factor.level]]
name = "4"
[[factor.level]]
name = "6"
set.model.num_hidden_layers = 6
[[factor]]
name = "heads"
[[factor.level]]
name = "gqa"
[[factor.level]]
name = "mha"
set.model.num_key_value_heads = "= model.num_attention_heads"
[[arm]]
name = "wide"
levels.depth = "6"
set.model.intermediate_size = 512
"""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def arms_of(text: str) -> dict[str, PlannedArm]:
    return {arm.id: arm for arm in expand(parse(text)).arms}


def test_an_arm_by_hand_has_the_baselines_levels_but_for_its_own() -> None:
    arms = arms_of(simple())
    wide = arms["wide"]
    assert wide.levels == {"depth": "6", "heads": "gqa", "arm": "wide"}
    assert wide.baseline == "depth_4-heads_gqa"
    assert (wide.config.model.num_hidden_layers, wide.config.model.intermediate_size) == (6, 512)
    within = arms_of(simple(('base = "demo"', 'base = "demo"\nwithin = ["depth"]')))
    assert within["wide"].baseline == "depth_6-heads_gqa"
    assert [arm.id for arm in expand(parse(simple()), only=["arm=wide"]).arms] == [
        "depth_4-heads_gqa",
        "wide",
    ]


def test_an_override_of_what_an_arm_sets_needs_that_the_arm_is_left_out() -> None:
    """The arm's own value has priority, so the option would do nothing there."""
    study = with_overrides(parse(simple()), {"model": {"intermediate_size": 640}})
    with pytest.raises(UsageError, match="intermediate_size: arm wide "):
        expand(study)
    arms = expand(study, only=["heads=mha"]).arms
    assert {arm.config.model.intermediate_size for arm in arms} == {640}
    # The baseline becomes the arm.
    same = with_overrides(parse(simple()), {"model": {"intermediate_size": 512}})
    assert "wide" not in {arm.id for arm in expand(same, only=["heads=mha"]).arms}


def test_layers_and_budget() -> None:
    arms = arms_of(simple(('base = "demo"', 'base = "demo"\nset.evaluate.tokens = 777')))
    config = arms["depth_6-heads_mha"].config
    base = merge.build([*presets.layers("demo")])
    assert config.schedule.length == Duration(1_000_000, "tokens")
    assert config.evaluate.every == Duration(166_667, "tokens")  # six of them, whatever the preset says
    assert config.evaluate.tokens == 777
    assert config.model == base.model.model_copy(update={"num_hidden_layers": 6, "num_key_value_heads": 4})
    assert config.data == base.data
    own = arms_of(simple(('base = "demo"', 'base = "demo"\nset.evaluate.every = "50 steps"')))
    assert {arm.config.evaluate.every for arm in own.values()} == {Duration(50, "steps")}


def test_time_is_training_time_alone() -> None:
    found = expand(parse(simple()), budget=Budget(Duration(120, "seconds")))
    assert {arm.config.schedule.clock for arm in found.arms} == {"training"}
    assert {arm.budget for arm in found.arms} == {"2 minutes of training"} == {g.budget for g in found.groups}


def test_a_level_may_change_the_alternative() -> None:
    arms = arms_of(
        simple(('set.model.num_key_value_heads = "= model.num_attention_heads"', 'set.optim.name = "adamw"'))
    )
    assert arms["depth_4-heads_mha"].config.optim.name == "adamw"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "num_hidden_layers = 6",
            "num_hidden_layers = 4",
            "depth_4-heads_gqa and depth_6-heads_gqa",
        ),
        (
            "num_hidden_layers = 6",
            "num_hidden_layers = -6",
            "x: arm depth_6-heads_gqa: model.num_hidden_layers",
        ),
        (
            '= model.num_attention_heads"',
            '= model.num_attention_heads / 3"',
            "arm depth_4-heads_mha: .* is not divisible",
        ),
        ('budget.tokens_per_arm = "1M"', "", "x: it has no budget"),
        ('name = "wide"', 'name = "depth_4-heads_gqa"', "two arms are called depth_4-heads_gqa"),
        (
            "[[arm]]",
            '[[exclude]]\nwhere.heads = "gqa"\nwhy = "no"\n[[arm]]',
            "its baseline depth_4-heads_gqa is excluded",
        ),
        (
            "[[arm]]",
            '[[exclude]]\nwhere.heads = "mha"\nwhy = "no"\n[[exclude]]\nwhere.depth = "6"\nwhy = "no"\n[[arm]]',
            None,
        ),
    ],
)
def test_refusals(old: str, new: str, message: str | None) -> None:
    study = parse(simple((old, new)))
    if message is None:
        assert [arm.id for arm in expand(study).arms] == ["depth_4-heads_gqa", "wide"]
        return
    with pytest.raises(UsageError, match=message) as error:
        expand(study)
    assert "\n" not in str(error.value)


def test_an_exclusion_without_effect_is_refused() -> None:
    study = load("matrix16")
    group = study.groups[0]
    exclusion = Exclusion(where={"gqa": ("on",), "fp4": ("on",)}, why="no")
    one = group.model_copy(update={"design": "one-at-a-time", "exclusions": (exclusion,)})
    with pytest.raises(UsageError, match="exclude: there is no arm with gqa on, fp4 on"):
        expand(study.model_copy(update={"groups": (one,)}))


def test_excluded_arms_are_listed_with_the_reason() -> None:
    text = simple(
        ("[[arm]]", '[[exclude]]\nwhere = { depth = "6", heads = ["mha"] }\nwhy = "too slow"\n[[arm]]')
    )
    found = expand(parse(text))
    assert found.excluded == ["depth 6, heads mha: too slow"]
    assert "depth_6-heads_mha" not in {arm.id for arm in found.arms}
    # Groups that are not run are not mentioned.
    claims = load("claims")
    assert expand(claims, only=["matrix"]).excluded == ["MHA, FP8: no claim needs it"]
    assert set(expand(claims).excluded) > {"MHA, FP8: no claim needs it"}
    assert expand(claims, only=["guide", "heads"]).excluded == []


def test_a_matrix_that_is_far_too_large_is_counted_and_not_made() -> None:
    factors = "".join(
        f'[[factor]]\nname = "f{n}"\nlevel = [' + ", ".join(f'{{name = "l{m}"}}' for m in range(30)) + "]\n"
        for n in range(14)
    )
    with pytest.raises(UsageError, match=r"478,296,900,000,000,000,000 arms are more than 1,000"):
        expand(parse(f'name = "a"\nbase = "demo"\nbudget.steps_per_arm = 4\n{factors}'))


def test_an_arm_whose_name_no_folder_can_have_is_refused() -> None:
    long = f'level = [{{name = "{"x" * 250}", set.optim.lr = 1e-3}}, {{name = "b"}}]'
    with pytest.raises(UsageError, match=r"252 characters, more than 200"):
        expand(parse(f'name = "a"\nbase = "demo"\nbudget.steps_per_arm = 4\n[[factor]]\nname = "f"\n{long}'))
