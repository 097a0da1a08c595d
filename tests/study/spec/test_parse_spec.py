"""Studies as TOML: parsed values, and errors in one line that name the cause."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.config.duration import Duration
from deskside.study.spec import parse_spec
from deskside.study.spec.expand import expand
from deskside.study.spec.parse_spec import budget_from_options, load, parse, with_overrides
from deskside.study.spec.spec import Budget
from deskside.utils.errors import UsageError

WHOLE = """
name = "trial"
question = "Is it better?"
base = "small"
seeds = 3
memory_fraction = 0.5
claims = ["gqa-speed"]
design = "full"
within = ["size"]
[budget]
minutes_per_arm = 30
[set]
batch.tokens = 65536
[baseline]
gqa = "on"
[[factor]]
name = "size"
[[factor.level]]
name = "s"
[[factor.level]]
name = "m"
preset = "medium"
[[factor]]
name = "gqa"
label = "grouped-query attention"
[[factor.level]]
name = "off"
set.model.num_key_value_heads = "= model.num_attention_heads"
[[factor.level]]
name = "on"
label = "GQA 4:1"
[[arm]]
name = "wide"
set.model.intermediate_size = 4096
[[exclude]]
where = { size = "m", gqa = ["off"] }
why = "it takes too long"
"""


def test_a_whole_file_is_read() -> None:
    study = parse(WHOLE)
    assert (study.name, study.memory_fraction, study.claims) == ("trial", 0.5, ("gqa-speed",))
    assert study.text == WHOLE
    (group,) = study.groups
    assert (group.name, group.seeds, group.within, group.design) == ("main", 3, ("size",), "full")
    assert group.budget == Budget(Duration(1800, "seconds"))
    assert group.baseline == {"gqa": "on"}
    assert [level.label for factor in group.factors for level in factor.levels] == [
        "size s",
        "size m",
        "grouped-query attention off",
        "GQA 4:1",
    ]
    assert group.factors[0].levels[1].preset == "medium"
    assert group.set == ({"batch": {"tokens": 65536}},)
    assert group.exclusions[0].where == {"size": ("m",), "gqa": ("off",)}


def test_groups_take_what_they_do_not_say_from_the_top() -> None:
    study = parse(
        'name = "g"\nbase = "small"\nseeds = 2\nset.batch.tokens = 65536\nbudget.steps_per_arm = 7\n'
        '[[group]]\nname = "a"\n[[group]]\nname = "b"\nbase = "medium"\nseeds = 4\nset.optim.lr = 0.01\n'
        'budget.tokens_per_arm = "3M"\n'
    )
    first, second = study.groups
    assert study.grouped
    assert (first.base, first.seeds, first.budget) == ("small", 2, Budget(Duration(7, "steps")))
    assert (second.base, second.seeds) == ("medium", 4)
    assert second.budget == Budget(Duration(3_000_000, "tokens"))
    assert second.set == ({"batch": {"tokens": 65536}}, {"optim": {"lr": 0.01}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name = ", "nmae = "), "nmae: unknown key; did you mean name?"),
        (('name = "trial"', 'name = "a/b"'), "name: "),
        (("seeds = 3", "seeds = 0"), "seeds: "),
        (("seeds = 3", "seeds = true"), "seeds: "),
        (("memory_fraction = 0.5", "memory_fraction = 1.5"), "memory_fraction: "),
        (('claims = ["gqa-speed"]', 'claims = "gqa"'), "claims: "),
        (('claims = ["gqa-speed"]', 'claims = ["gqa-sped"]'), "claims: gqa-sped: "),
        (('name = "trial"', f'name = "{"a" * 300}"'), "name: "),
        (("batch.tokens = 65536", f"{'a.' * 2000}a = 1"), "nested more than 100 levels deep"),
        (('design = "full"', 'design = "half"'), "design: "),
        (('within = ["size"]', 'within = ["sise"]'), "within: sise: unknown factor; did you mean size?"),
        (("minutes_per_arm = 30", "minutes_per_arms = 30"), "budget: give exactly one of minutes_per_arm"),
        (("minutes_per_arm = 30", "minutes_per_arm = 30\nsteps_per_arm = 3"), "budget: give exactly one of"),
        (("minutes_per_arm = 30", "minutes_per_arm = -1"), "minutes_per_arm: "),
        (("minutes_per_arm = 30", "minutes_per_arm = nan"), "minutes_per_arm: "),
        (("minutes_per_arm = 30", 'tokens_per_arm = "3h"'), "tokens_per_arm: "),
        (("minutes_per_arm = 30", "steps_per_arm = 1.5"), "steps_per_arm: "),
        (("batch.tokens = 65536", "batch.token = 65536"), "set: batch.token: "),
        (
            ("batch.tokens = 65536", "model = 3"),
            "set: model: is a table; set one of its options, such as model.",
        ),
        (("batch.tokens = 65536", "seed = 3"), "set: seed: "),
        (("batch.tokens = 65536", "schedule.steps = 3"), "set: schedule.steps: "),
        (("intermediate_size", "intermediat_size"), "arm wide: set: model.intermediat_size: "),
        (('gqa = "on"', 'gqa = "onn"'), "baseline: gqa: onn: unknown level; did you mean on?"),
        (('gqa = "on"', 'size = "s"'), "baseline: size has no effect"),
        (('gqa = "on"', "gqa = true"), "baseline: gqa: "),
        (('preset = "medium"', 'preset = "mediun"'), "factor size: level m: preset: mediun: no such preset"),
        (('base = "small"', 'base = "tiny"'), "base: tiny: no such preset"),
        (('name = "m"', 'name = "s"'), "factor size: level s: duplicate name"),
        (('name = "m"', 'name = "m/x"'), "factor size: level m/x: name: "),
        (('name = "gqa"', 'name = "size"'), "factor size: duplicate name"),
        (('name = "gqa"', 'name = "G"'), "factor G: name: "),
        (('name = "gqa"', 'name = "arm"'), "factor arm: "),
        (('size = "m", ', 'sizes = "m", '), "exclude 1: where: sizes: unknown factor; did you mean size?"),
        (('why = "it takes too long"', ""), "exclude 1: why: is missing"),
        (("[set]", "[set"), "not valid TOML"),
        (("[baseline]", "[[baseline]]"), "baseline: "),
    ],
)
def test_refusals_name_the_thing(change: tuple[str, str], message: str) -> None:
    assert change[0] in WHOLE
    with pytest.raises(UsageError) as error:
        parse(WHOLE.replace(*change, 1), "trial.toml")
    assert message in str(error.value)
    assert str(error.value).startswith("trial.toml: ")
    assert "\n" not in str(error.value)


def test_a_factor_of_one_level_is_refused() -> None:
    with pytest.raises(UsageError, match="two or more levels"):
        parse('name = "x"\nbase = "small"\n[[factor]]\nname = "a"\n[[factor.level]]\nname = "b"\n')


def test_files_are_found_beside_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "mine.toml").write_text("[model]\nnum_hidden_layers = 3\n")
    (folder / "study.toml").write_text('name = "x"\nbase = "mine.toml"\n')
    monkeypatch.chdir(tmp_path)
    assert load("deep/study.toml").groups[0].base == str(Path("deep/mine.toml"))
    with pytest.raises(UsageError, match=r"deep/none\.toml: no such file"):
        load("deep/none.toml")


def test_an_unknown_study_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean matrix16"):
        load("matrix15")


def test_overrides_end_the_set_of_every_group() -> None:
    given = {"data": {"path": "data/x"}}
    study = with_overrides(parse(WHOLE), given)
    assert study.overrides == given
    assert study.groups[0].set[-1] == given
    assert with_overrides(parse(WHOLE), {}) == parse(WHOLE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": {"num_key_value_heads": "2"}},
            "--model.num_key_value_heads: factor gqa of the study varies this key",
        ),
        ({"schedule": {"steps": "2"}}, "--schedule.steps: not an option of a study"),
        ({"seed": "2"}, "--seed: not an option of a study"),
    ],
)
def test_overrides_without_effect_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_overrides(parse(WHOLE), given)


def test_budgets_of_the_command_line() -> None:
    assert budget_from_options() is None
    assert budget_from_options(minutes=0.5) == Budget(Duration(30, "seconds"))
    assert (
        budget_from_options(tokens="2M")
        == budget_from_options(tokens=2_000_000)
        == Budget(Duration(2_000_000, "tokens"))
    )
    with pytest.raises(UsageError, match="--minutes-per-arm and --tokens-per-arm"):
        budget_from_options(minutes=1, tokens="3M")
    with pytest.raises(UsageError, match="tokens_per_arm"):
        budget_from_options(tokens="many")


@pytest.mark.parametrize(
    ("given", "words", "every"),
    [
        (Duration(1800, "seconds"), "30 minutes of training", "5m"),
        (Duration(60, "seconds"), "1 minute of training", "10s"),
        (Duration(3, "seconds"), "3 seconds of training", "0.5s"),
        (Duration(100_000_000, "tokens"), "100M tokens", "16666667 tokens"),
        (Duration(400, "steps"), "400 steps", "67 steps"),
        (Duration(1, "steps"), "1 step", "1 step"),
    ],
)
def test_a_budget_in_words_and_its_evaluations(given: Duration, words: str, every: str) -> None:
    found = Budget(given)
    assert found.text == words
    assert found.default_layer == {"evaluate": {"every": every}}


def test_the_presets() -> None:
    assert set(parse_spec.preset_names()) >= {"matrix16", "architecture", "precision", "optimizer", "batch"}


def toml(value: object) -> str:
    """Return a value as inline TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def places(value: object, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the path of everything inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, entry in items for path in [(*above, key), *places(entry, (*above, key))]]


ODD = st.one_of(
    st.none(),  # the key is removed
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.sampled_from(
        ["", "on", "size", "m", "= model.hidden_size / 7", "=", "../x", "small", "none", "none.toml"]
    ),
    st.just([]),
    st.just([3]),
    st.just({}),
    st.just({"name": "x"}),
)


@settings(max_examples=300, deadline=None)
@given(where=st.sampled_from(places(tomllib.loads(WHOLE))), odd=ODD)
def test_whatever_is_written_is_a_study_or_one_line(where: tuple[str | int, ...], odd: object) -> None:
    top = tomllib.loads(WHOLE)
    inside: Any = top
    for key in where[:-1]:
        inside = inside[key]
    if odd is None:
        del inside[where[-1]]
    else:
        inside[where[-1]] = odd
    text = "\n".join(f"{key} = {toml(value)}" for key, value in top.items())
    try:
        assert expand(parse(text)).arms
    except UsageError as error:
        assert "\n" not in str(error)
