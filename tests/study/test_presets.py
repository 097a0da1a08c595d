"""The studies that ship: every one expands, and has the stated arms."""

import itertools
from pathlib import Path

import pytest

from deskside.cli.train import COMMAND as TRAIN
from deskside.config import presets
from deskside.config.merge import build
from deskside.config.run import RunConfig
from deskside.facts.records import find_record
from deskside.run.record import flatten
from deskside.study.spec import parse_spec
from deskside.study.spec.expand import PlannedArm, expand

OWN = (
    "adamw", "architecture", "batch", "expert-formats", "experts", "languages", "matrix16", "memory", "optimizer",
    "precision",
)  # fmt: skip
QUICK = [f"{name}-quick" for name in OWN]


def arms_of(name: str, group: str | None = None) -> dict[str, PlannedArm]:
    found = expand(parse_spec.load(name)).arms
    return {arm.id: arm for arm in found if group in (None, arm.group)}


@pytest.mark.parametrize("name", parse_spec.preset_names())
def test_every_preset_expands(name: str) -> None:
    study = parse_spec.load(name)
    assert study.name == name
    assert study.question.endswith("?")
    found = expand(study)
    by_id = {arm.id: arm for arm in found.arms}
    for arm in found.arms:
        assert by_id[arm.baseline].baseline == arm.baseline
        assert arm.config.seed == RunConfig().seed  # the runner sets the trial's seed
        assert RunConfig.model_validate(arm.config.model_dump(mode="json")) == arm.config
        assert Path(arm.id).name == arm.id
        assert len(f"{arm.id}-s100") < 100


@pytest.mark.parametrize("name", QUICK)
def test_quick_presets_use_a_text_that_is_there(name: str) -> None:
    for arm in arms_of(name).values():
        assert arm.config.data.sources == ("bundled:tiny_shakespeare.txt",)
        # Compiling takes longer than the study may.
        assert arm.config.compute.compile in ("auto", "off", "fused")


@pytest.mark.parametrize("name", OWN)
def test_quick_presets_ask_the_same_of_something_small(name: str) -> None:
    whole, quick = parse_spec.load(name), parse_spec.load(f"{name}-quick")
    assert [group.name for group in quick.groups] == [group.name for group in whole.groups]
    for large, small in zip(whole.groups, quick.groups, strict=True):
        assert {f.name for f in small.factors} <= {f.name for f in large.factors}
        assert small.design == large.design


def test_matrix16_against_a_matrix_by_hand() -> None:
    """Four sizes from the seed document x {MHA, GQA 4:1} x {BF16, NVFP4}, 30 minutes each, 85 % of the memory."""
    sizes = {
        "small": (512, 8, 8, 2048),
        "medium": (768, 12, 12, 3072),
        "large": (1024, 16, 16, 4096),
        "xlarge": (1280, 20, 20, 5120),
    }
    study = parse_spec.load("matrix16")
    assert study.memory_fraction == 0.85
    arms = arms_of("matrix16")
    assert len(arms) == 16
    for size, gqa, fp4 in itertools.product(sizes, ("off", "on"), ("off", "on")):
        arm = arms[f"size_{size}-gqa_{gqa}-fp4_{fp4}"]
        hidden, layers, heads, ffn = sizes[size]
        wanted = build(
            [
                *presets.layers(size),
                {
                    "model": {
                        "hidden_size": hidden,
                        "num_hidden_layers": layers,
                        "num_attention_heads": heads,
                        "num_key_value_heads": heads // 4 if gqa == "on" else heads,
                        "intermediate_size": ffn,
                    },
                    "precision": {"name": "nvfp4" if fp4 == "on" else "bf16"},
                    "schedule": {"length": "30m", "clock": "training"},
                    "evaluate": {"every": "5m"},
                },
            ]
        )
        assert arm.config == wanted
        assert arm.baseline == f"size_{size}-gqa_off-fp4_off"
        assert arm.levels == {"size": size, "gqa": gqa, "fp4": fp4}


def test_matrix16_quick_has_the_same_arms() -> None:
    whole, quick = arms_of("matrix16"), arms_of("matrix16-quick")
    assert list(quick) == list(whole)
    for one, other in zip(whole.values(), quick.values(), strict=True):
        assert (one.levels, one.baseline, one.label) == (other.levels, other.baseline, other.label)
        ratio = [
            a.config.model.num_attention_heads // a.config.model.num_key_value_heads for a in (one, other)
        ]
        assert ratio[0] == ratio[1]
        assert one.config.precision == other.config.precision


@pytest.mark.parametrize(
    ("name", "width", "head"), [("architecture", 1024, 128), ("architecture-quick", 128, 16)]
)
def test_architecture_varies_what_the_issue_lists(name: str, width: int, head: int) -> None:
    block = arms_of(name, "block")
    base = block["block-baseline"].config
    shape = base.model
    assert (shape.qk_norm, shape.position_embedding, shape.norm, shape.norm_position) == (
        True,
        "rope",
        "rmsnorm",
        "pre",
    )
    models = {arm_id.removeprefix("block-"): arm.config.model for arm_id, arm in block.items()}
    assert not models["qk_norm_off"].qk_norm
    assert models["position_learned"].position_embedding == "learned"
    assert models["norm_layernorm"].norm == "layernorm"
    assert models["norm_position_post"].norm_position == "post"
    assert models["embeddings_tied"].tie_word_embeddings
    for act in ("gelu", "relu2"):
        mlp = models[f"mlp_{act}"]
        assert (mlp.gated_mlp, mlp.hidden_act) == (False, act)
        weights = 2 * mlp.intermediate_size / (3 * shape.intermediate_size)
        assert abs(weights - 1) < 0.02, "an MLP without a gate has as many weights"
    window = next(model for key, model in models.items() if key.startswith("window"))
    assert window.sliding_window == base.batch.sequence_length // 4
    staged = block["block-context_staged"].config.schedule.stages
    longest = base.batch.sequence_length
    assert [stage.sequence_length for stage in staged] == [longest // 4, longest // 2, longest]
    heads = [arm.config.model for arm in arms_of(name, "heads").values()]
    assert {(m.num_attention_heads // m.num_key_value_heads, m.head_dim) for m in heads} == {
        (4, head // 2), (1, head // 2), (8, head // 2), (16, head // 2), (4, head),
    }  # fmt: skip
    assert {m.num_attention_heads * m.head_dim for m in heads} == {width}
    fused = [
        (a.config.model.fused_qkv, a.config.model.fused_gate_up) for a in arms_of(name, "fused").values()
    ]
    assert fused == [(True, True), (False, True), (True, False)]


def test_batch_is_one_step_in_ever_larger_passes() -> None:
    arms = list(arms_of("batch").values())
    assert {arm.config.batch.tokens for arm in arms} == {2**19}
    assert [arm.config.batch.micro_tokens for arm in arms] == [2**n for n in range(11, 20)]


@pytest.mark.parametrize("name", ["precision", "precision-quick"])
def test_precision_compares_every_recipe(name: str) -> None:
    from deskside.config.recipes import RECIPES

    recipes = {arm.config.precision.name for arm in arms_of(name, "loss").values()}
    assert recipes == set(RECIPES) - {"fp32"}


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_every_quick_arm_trains_here(name: str, tmp_path: Path) -> None:
    """Two steps of each arm: none is refused because of its requirements."""
    from deskside.study.spec.parse_spec import budget_from_options, with_overrides
    from deskside.train import training_run

    data = {"path": str(tmp_path / "data"), "sources": ["bundled:tiny_shakespeare.txt"]}
    study = with_overrides(parse_spec.load(name), {"data": data})
    for arm in expand(study, budget=budget_from_options(steps=2)).arms:
        outcome = training_run.start(arm.config, (tmp_path / "runs", arm.id, arm.id), "a test")
        assert (outcome.status, outcome.summary["steps"]) == ("finished", 2), arm.id


def test_recipe_changes_one_thing_at_a_time() -> None:
    arms = arms_of("recipe")
    baseline = arms.pop("baseline")
    record = find_record("h200-english-5min-fp8-stages")
    options, given = TRAIN.parse_config(record.options)
    assert options.preset == parse_spec.load("recipe").groups[0].base
    recorded = build([*presets.for_pretraining("124m"), given])
    assert (baseline.config.precision, baseline.config.schedule.stages) == (
        recorded.precision,
        recorded.schedule.stages,
    )
    assert (baseline.config.optim, baseline.config.model) == (recorded.optim, recorded.model)
    before = flatten(baseline.config.model_dump(mode="json"))
    for arm in arms.values():
        after = flatten(arm.config.model_dump(mode="json"))
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        parts = {key.rsplit(".", 1)[0] for key in changed}
        assert parts and (len(parts) == 1 or arm.id == "with-batch-growth"), arm.id
