"""Merging layers into one configuration: origins, alternatives, options without effect, and one-line errors."""

import json
import math
import random
import re
import string
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.cli.train import UPCYCLING
from deskside.config.base import UserPath
from deskside.config.merge import (
    build,
    config_fields,
    merge,
    option_keys,
    parts_of,
    refuse_other_model,
    resolved_layers,
)
from deskside.config.model import ModelConfig
from deskside.config.no_effect import NO_EFFECT
from deskside.config.optim import AdamWConfig
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError

# (key, cause) of every rule of NO_EFFECT -> (a layer in which the key has an effect, a layer that removes it).
LIVE_AND_DEAD: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("model.rope_theta", "model.position_embedding"): (
        {"model": {"rope_theta": 5e5}},
        {"model": {"position_embedding": "learned"}},
    ),
    ("model.norm_bias", "model.norm"): (
        {"model": {"norm": "layernorm", "norm_bias": True}},
        {"model": {"norm": "rmsnorm"}},
    ),
    ("model.fused_gate_up", "model.gated_mlp"): (
        {"model": {"fused_gate_up": False}},
        {"model": {"gated_mlp": False}},
    ),
    ("model.num_experts_per_tok", "model.num_experts"): (
        {"model": {"num_experts": 8, "num_experts_per_tok": 2}},
        {"model": {"num_experts": 0}},
    ),
    ("model.moe_intermediate_size", "model.num_experts"): (
        {"model": {"num_experts": 8, "moe_intermediate_size": 96}},
        {"model": {"num_experts": 0}},
    ),
    ("model.norm_topk_prob", "model.num_experts"): (
        {"model": {"num_experts": 8, "norm_topk_prob": False}},
        {"model": {"num_experts": 0}},
    ),
    ("model.router_aux_loss_coef", "model.num_experts"): (
        {"model": {"num_experts": 8, "router_aux_loss_coef": 0.02}},
        {"model": {"num_experts": 0}},
    ),
    ("model.scoring_func", "model.num_experts"): (
        {"model": {"num_experts": 8, "scoring_func": "sigmoid"}},
        {"model": {"num_experts": 0}},
    ),
    ("model.router_z_loss_coef", "model.num_experts"): (
        {"model": {"num_experts": 8, "router_z_loss_coef": 0.001}},
        {"model": {"num_experts": 0}},
    ),
    ("model.shared_expert_intermediate_size", "model.num_experts"): (
        {"model": {"num_experts": 8, "shared_expert_intermediate_size": 96, "qk_norm": False}},
        {"model": {"num_experts": 0}},
    ),
    ("model.router_bias_update_rate", "model.num_experts"): (
        {"model": {"num_experts": 8, "scoring_func": "sigmoid", "router_bias_update_rate": 0.01}},
        {"model": {"num_experts": 8, "scoring_func": "softmax"}},
    ),
    ("model.intermediate_size", "model.num_experts"): (
        {"model": {"intermediate_size": 3072}},
        {"model": {"num_experts": 8}},
    ),
    ("model.fused_gate_up", "model.num_experts"): (
        {"model": {"fused_gate_up": False}},
        {"model": {"num_experts": 8}},
    ),
    ("optim.weight_decay_epochs", "optim.weight_decay"): (
        {"optim": {"weight_decay_epochs": 4.0}},
        {"optim": {"weight_decay": 0.0}},
    ),
    ("optim.weight_decay_schedule", "optim.weight_decay"): (
        {"optim": {"weight_decay_schedule": "constant"}},
        {"optim": {"weight_decay": 0}},
    ),
    ("optim.cautious_weight_decay", "optim.weight_decay"): (
        {"optim": {"cautious_weight_decay": False}},
        {"optim": {"weight_decay": 0}},
    ),
    ("optim.momentum_start", "optim.momentum_warmup_steps"): (
        {"optim": {"momentum_start": 0.5}},
        {"optim": {"momentum_warmup_steps": 0}},
    ),
    ("optim.momentum_cooldown", "optim.momentum_end"): (
        {"optim": {"momentum_cooldown": 0.2, "momentum_end": 0.8}},
        {"optim": {"momentum_end": None}},
    ),
    **{
        (f"optim.ema_nesterov_{key}", "optim.ema_nesterov"): (
            {"optim": {"ema_nesterov": 0.6, f"ema_nesterov_{key}": 0.5}},
            {"optim": {"ema_nesterov": 0}},
        )
        for key in ("decay", "start", "until")
    },
    ("optim.normalize_beta", "optim.normalize"): (
        {"optim": {"normalize_beta": 0.5}},
        {"optim": {"normalize": "none"}},
    ),
    ("schedule.decay_shape", "schedule.decay"): (
        {"schedule": {"decay_shape": "1-sqrt"}},
        {"schedule": {"decay": 0}},
    ),
    ("schedule.decay_power", "schedule.decay"): (
        {"schedule": {"decay_power": 2}},
        {"schedule": {"decay": 0}},
    ),
    ("schedule.final_lr_fraction", "schedule.decay"): (
        {"schedule": {"final_lr_fraction": 0.2}},
        {"schedule": {"decay": 0}},
    ),
    ("schedule.batch_growth_until", "schedule.batch_growth"): (
        {"schedule": {"batch_growth": 2, "batch_growth_until": 0.5}},
        {"schedule": {"batch_growth": 1}},
    ),
    ("schedule.batch_lr", "schedule.batch_growth"): (
        {"schedule": {"batch_growth": 2, "batch_lr": "sqrt"}},
        {"schedule": {"batch_growth": 1}},
    ),
    ("schedule.clock", "schedule.length"): (
        {"schedule": {"hours": 2, "clock": "training"}},
        {"schedule": {"steps": 100}},
    ),
    ("data.packing", "align.name"): (
        {"data": {"packing": "shuffled"}},
        {"align": {"name": "sft"}, "data": {"document_mask": True}},
    ),
    ("data.val_fraction", "align.name"): (
        {"data": {"sources": ["a.txt"], "val_fraction": 0.1}},
        {"align": {"name": "sft"}, "data": {"document_mask": True, "sources": []}},
    ),
    **{
        (f"data.{key}", "align.name"): (
            {"data": {key: value}},
            {"align": {"name": "dpo"}, "data": {"document_mask": True}},
        )
        for key, value in {
            "weights": {"a": 1.0},
            "language_temperature": 2.0,
            "source_temperature": 2.0,
            "prefetch": 4,
        }.items()
    },
    ("data.val_fraction", "data.sources"): (
        {"data": {"sources": ["a.txt"], "val_fraction": 0.1}},
        {"data": {"sources": []}},
    ),
    ("multi_token.until", "multi_token.weights"): (
        {"multi_token": {"weights": [0.5], "until": 0.5}},
        {"multi_token": {"weights": []}},
    ),
    ("average.half_life", "average.name"): (
        {"average": {"name": "ema", "half_life": 0.1}},
        {"average": {"name": "tail"}},
    ),
    **{
        (f"average.{key}", "average.name"): (
            {"average": {"name": "tail", key: value}},
            {"average": {"name": "none"}},
        )
        for key, value in {"start": 0.5, "every": 2, "blend": "auto", "offload": True}.items()
    },
    ("evaluate.tokens", "evaluate.every"): (
        {"evaluate": {"every": "1m", "tokens": 5000}},
        {"evaluate": {"every": None}},
    ),
    **{
        (f"precision.{key}", "precision.name"): (
            {"precision": {"name": "fp8-tensorwise", key: value}},
            {"precision": {"name": "bf16"}},
        )
        for key, value in {
            "keep_first": 0.1,
            "keep_last": 0.2,
            "keep": ["o_proj"],
            "head": "fp8",
            "warmup_steps": 10,
            "bf16_from": 0.8,
            "native": "never",
            "backend": "torchao",
        }.items()
    },
    **{
        (f"precision.{key}", "precision.name"): (
            {"precision": {"name": "bf16", key: value}},
            {"precision": {"name": "fp32"}},
        )
        for key, value in {"weight_cache": False, "accumulate": "fused"}.items()
    },
    **{
        (f"precision.{key}", "compute.compile"): (
            {"precision": {"name": "bf16", key: value}},
            {"compute": {"compile": "block"}},
        )
        for key, value in {"weight_cache": False, "accumulate": "fused"}.items()
    },
    **{
        (f"precision.{key}", "precision.backend"): (
            {"precision": {"name": "fp8-tensorwise", "keep": ["o_proj"], key: value}},
            {"precision": {"name": "fp8-tensorwise", "keep": ["o_proj"], "backend": "torchao"}},
        )
        for key, value in {"weight_cache": False, "accumulate": "fused", "native": "never"}.items()
    },
    **{
        (f"precision.{key}", "adapter.rank"): (
            {"precision": {"name": "bf16", key: value}},
            {"adapter": {"rank": 8}, "optim": {"name": "adamw"}},
        )
        for key, value in {"weight_cache": False, "accumulate": "fused"}.items()
    },
    ("model.router_bias_update_rate", "adapter.rank"): (
        {"model": {"num_experts": 8, "scoring_func": "sigmoid", "router_bias_update_rate": 0.01}},
        {
            "model": {"num_experts": 8, "scoring_func": "sigmoid"},
            "adapter": {"rank": 8},
            "optim": {"name": "adamw"},
        },
    ),
    ("optim.embedding_lr", "model.tie_word_embeddings"): (
        {"optim": {"embedding_lr": 0.2}},
        {"model": {"tie_word_embeddings": True}},
    ),
    ("optim.embedding_lr", "adapter.rank"): (
        {"optim": {"name": "adamw", "embedding_lr": 0.2}},
        {"adapter": {"rank": 8}, "optim": {"name": "adamw"}},
    ),
    ("optim.head_lr", "adapter.rank"): (
        {"optim": {"name": "adamw", "head_lr": 0.2}},
        {"adapter": {"rank": 8}, "optim": {"name": "adamw"}},
    ),
    ("optim.scale", "adapter.rank"): (
        {"optim": {"scale": False}},
        {"adapter": {"rank": 8}, "optim": {"name": "adamw"}},
    ),
}
RULES = [pytest.param(rule, id=f"{rule.key}<-{rule.cause}") for rule in NO_EFFECT]


IN_BF16_SOMEWHERE: list[dict[str, Any]] = [
    {"name": "bf16"}, {"name": "nvfp4"}, {"keep_first": 0.1}, {"keep": ["o_proj"]},
    {"warmup_steps": 10}, {"bf16_from": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("options", IN_BF16_SOMEWHERE)
def test_fused_accumulation_needs_weight_gradients_in_bf16(options: dict[str, Any]) -> None:
    precision = {"name": "fp8-delayed", "accumulate": "fused"}
    assert build([{"precision": {**precision, **options}}]).precision.accumulate == "fused"
    with pytest.raises(UsageError, match=r"^precision\.accumulate: has no effect here: no weight gradient"):
        build([{"precision": precision}])


def value_at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def together(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return both as one layer. The length of the upper one replaces that of the lower one."""
    joined = {part: {**below.get(part, {}), **above.get(part, {})} for part in {**below, **above}}
    if "steps" in joined.get("schedule", {}):
        joined["schedule"].pop("hours", None)
    return joined


def test_every_rule_has_a_case() -> None:
    assert sorted(LIVE_AND_DEAD) == sorted((rule.key, rule.cause) for rule in NO_EFFECT)


@pytest.mark.parametrize("rule", RULES)
def test_a_key_that_lost_its_effect_to_a_higher_layer_is_dropped(rule: Any) -> None:
    below, above = LIVE_AND_DEAD[rule.key, rule.cause]
    live, default = value_at(build([below]), rule.key), value_at(build([above]), rule.key)
    assert live != default
    assert value_at(build([below, above]), rule.key) == default


@pytest.mark.parametrize("rule", RULES)
def test_a_key_without_effect_set_in_the_same_place_is_an_error(rule: Any) -> None:
    below, above = LIVE_AND_DEAD[rule.key, rule.cause]
    for layers in ([together(below, above)], [above, together({}, below) | dead_value(below, above, rule)]):
        with pytest.raises(UsageError) as error:
            build(layers)
        line = str(error.value)
        assert line.startswith(f"{rule.key}: has no effect here: ") and "\n" not in line
        assert line.endswith(rule.remedy)


def dead_value(below: dict[str, Any], above: dict[str, Any], rule: Any) -> dict[str, Any]:
    """Return a layer with only the key, to be put above the layer that removes its effect."""
    part, leaf = rule.key.split(".")
    return {part: {leaf: below[part][leaf]}}


def test_higher_layers_win_and_are_the_origin() -> None:
    values, origins = merge(
        [{"seed": 1, "model": {"hidden_size": 64}}, {"model": {"hidden_size": 128}}, {"seed": 3}]
    )
    assert values == {"seed": 3, "model": {"hidden_size": 128}}
    assert origins == {("seed",): 2, ("model", "hidden_size"): 1}


def test_merging_does_not_change_the_layers() -> None:
    layers = [{"model": {"num_experts": 8, "norm_topk_prob": False}}, {"model": {"num_experts": 0}}]
    before = json.dumps(layers)
    build(layers)
    assert json.dumps(layers) == before


def test_another_alternative_drops_the_options_of_the_first() -> None:
    muon = {"optim": {"name": "muon", "momentum": 0.9, "lr": 0.05, "weight_decay": 0.3}}
    config = build([muon, {"optim": {"name": "adamw"}}])
    assert isinstance(config.optim, AdamWConfig)
    assert config.optim.lr == 0.05  # both have one
    cosine = build([{"schedule": {"decay": 0.2, "length": "5h"}}, {"schedule": {"name": "cosine"}}])
    assert cosine.schedule.name == "cosine" and str(cosine.schedule.length) == "5h"


def test_the_same_alternative_again_keeps_its_options() -> None:
    config = build([{"optim": {"momentum": 0.9}}, {"optim": {"name": "muon"}}])
    assert value_at(config, "optim.momentum") == 0.9


def test_another_data_path_drops_the_sources_of_the_first() -> None:
    """Otherwise they would be prepared into a misspelled path, and the model would be trained on the wrong text."""
    preset = {"data": {"path": "data/demo", "sources": ["bundled:text.txt"], "val_fraction": 0.1}}
    data = build([preset, {"data": {"path": "data/mine"}}]).data
    assert (data.path, data.sources, data.val_fraction) == ("data/mine", (), None)
    for same in ({"path": "data/demo"}, {"prefetch": 3}):
        assert build([preset, {"data": same}]).data.sources == ("bundled:text.txt",)
    both = {"data": {"path": "data/mine", "sources": ["other.txt"]}}
    assert build([preset, both]).data.sources == ("other.txt",)


def test_mixture_weights_are_replaced_as_a_whole() -> None:
    config = build([{"data": {"weights": {"en": 0.5, "de": 0.5}}}, {"data": {"weights": {"fr": 1.0}}}])
    assert config.data.weights == {"fr": 1.0}


@pytest.mark.parametrize(
    ("given", "length"),
    [({"steps": 7}, "7 steps"), ({"hours": 1.5}, "1h30m"), ({"tokens": "2B"}, "2B tokens")],
)
def test_aliases_of_the_length(given: dict[str, Any], length: str) -> None:
    config = build([{"schedule": {"length": "9h"}}, {"schedule": given}])
    assert str(config.schedule.length) == length


ERRORS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"model": {"num_attention_heads": 12, "num_key_value_heads": 5}},
     ("model.num_key_value_heads", "[1, 2, 3, 4, 6, 12]")),
    ({"model": {"hidden_size": 100}}, ("model.hidden_size", "12 heads", "head_dim")),
    ({"model": {"hidden_size": "wide"}}, ("model.hidden_size", "wide")),
    ({"model": {"num_attention_heads": "many"}}, ("model.num_attention_heads", "many")),
    ({"model": {"hidden_size": None}}, ("model.hidden_size",)),
    ({"model": {"num_attention_heads": 0}}, ("model.num_attention_heads",)),
    ({"model": {"head_dim": 63}}, ("model.head_dim", "even")),
    ({"model": {"sliding_window": 256}}, ("model.sliding_window", "window_pattern SSSL")),
    ({"model": {"window_pattern": "SL"}}, ("model.window_pattern", "sliding_window 512")),
    ({"model": {"window_pattern": "SX", "sliding_window": 4}}, ("model.window_pattern", "SSSL")),
    ({"model": {"window_pattern": "", "sliding_window": 4}}, ("model.window_pattern", "SSSL")),
    ({"model": {"num_experts": 4, "num_experts_per_tok": 8}}, ("model.num_experts_per_tok: 8 exceeds", "1, for")),
    ({"model": {"num_experts": 4}}, ("model.num_experts_per_tok: 8, the default, exceeds", "1, for")),
    ({"model": {"hidden_act": "swish"}}, ("model.hidden_act", "silu")),
    ({"model": "124m"}, ("model", "124m")),
    ({"model": {"hidden_size": {"a": 1}}}, ("model.hidden_size",)),
    ({"batch": {"sequence_length": 4096}}, ("batch.sequence_length", "--model.max_position_embeddings")),
    ({"batch": {"tokens": 5000}}, ("batch.tokens", "use 4096")),
    ({"batch": {"micro_tokens": 3000}}, ("batch.micro_tokens", "use 2048")),
    ({"batch": {"micro_tokens": 3 * 2048}}, ("batch.micro_tokens", f"batch.tokens = {RunConfig().batch.tokens}")),
    ({"batch": {"micro_tokens": "few"}}, ("batch.micro_tokens", "few")),
    ({"schedule": {"stages": [{"until": 1.0, "sequence_length": 999}]}}, ("schedule.stages", "999")),
    ({"schedule": {"stages": [{"until": 1.0, "sequence_length": 512, "window": 64}]}},
     ("schedule.stages", "window_pattern")),
    ({"schedule": {"stages": [{"until": 1.0, "sequence": 512}]}}, ("schedule.stages", "sequence_length")),
    ({"schedule": {"steps": 5, "hours": 1}}, ("schedule.steps and schedule.hours", "one")),
    ({"schedule": {"length": "soon"}}, ("schedule.length", "24h")),
    ({"schedule": {"name": "linear"}}, ("schedule", "cosine or wsd")),
    ({"schedule": {"name": "cosine", "decay": 0.5}}, ("schedule.decay", "schedule.name wsd")),
    ({"schedule": {"warmup": "40 steps", "decay": 1.0}}, ("schedule.warmup", "40 steps", "lower decay")),
    ({"optim": {"name": "adamw", "momentum": 0.9}}, ("optim.momentum", "optim.name muon")),
    ({"optim": {"name": "muon", "states": "8bit", "momentum": 0.998}}, ("optim.momentum", "8bit", "0.995")),
    ({"optim": {"name": "sgd"}}, ("optim", "adamw or muon")),
    ({"optim": {"betas": [0.9]}}, ("optim.betas",)),
    ({"optim": {"betas": [0.9, 1.5]}}, ("optim.betas", "1.5")),
    ({"seed": -1}, ("seed", "-1")),
    ({"checkpoint": {"every": "1 epochs"}}, ("checkpoint.every", "steps, tokens or time", "10m")),
    ({"checkpoint": {"keep_every": "2 epochs"}}, ("checkpoint.keep_every", "steps, tokens or time")),
    ({"checkpoint": {"keep_best": True, "keep_every": "50 steps"}}, ("checkpoint.keep_best", "checkpoint.keep_every")),
    ({"evaluate": {"every": "0.5 epochs"}}, ("evaluate.every", "steps, tokens or time")),
    ({"precision": {"name": "fp4"}}, ("precision.name", "nvfp4")),
    ({"precision": {"name": "fp8", "backend": "torchao"}}, ("precision.backend", "fp8-tensorwise, fp8-rowwise")),
    ({"precision": {"name": "fp8", "keep_first": 1.0}}, ("precision.keep_first", "1.0")),
    ({"precision": {"name": "fp8", "bf16_from": 0}}, ("precision.bf16_from", "0")),
    ({"precision": {"name": "fp8", "keep_first": 0.5, "keep_last": 0.5}},
     ("precision.name", "the first 6 and the last 6 of 12", "--precision.keep_first 0")),
    ({"precision": {"name": "nvfp4"}, "model": {"num_hidden_layers": 2}}, ("precision.name", "nothing is quantized")),
    ({"precision": {"name": "fp8", "warmup_steps": 50}, "schedule": {"steps": 50}},
     ("precision.warmup_steps", "50 steps", "bf16")),
    ({"precision": {"name": "fp8", "keep": "o_proj"}}, ("precision.keep", "brackets", "o_proj")),
    ({"precision": {"name": "fp8", "keep": ["out"]}}, ("precision.keep", "'o_proj'", "'out'")),
    ({"precision": {"name": "fp8", "keep": ["q_proj", "o_proj", "up_proj", "down_proj"]}},
     ("precision.keep", "nothing is left", "bf16")),
    ({"precision": {"name": "fp8"}, "compute": {"compile": "block"}}, ("compute.compile", "fp8", "block", "use auto")),
    ({"precision": {"name": "nvfp4"}, "compute": {"compile": "model"}}, ("compute.compile", "nvfp4", "use auto")),
    ({"precision": {"name": "nvfp4"}, "parallel": {"mode": "shard"}},
     ("parallel.mode", "nvfp4", "--parallel.mode replicate")),
    ({"parallel": {"bucket_mib": 64, "gradient_dtype": "bfloat16"}}, ("parallel.bucket_mib", "leave it out")),
    ({"parallel": {"mode": "shard", "gradient_dtype": "bfloat16"}},
     ("parallel.gradient_dtype", "--parallel.mode replicate", "float32")),
    ({"precision": {"name": "fp8-rowwise", "backend": "torchao"}, "model": {"num_experts": 8}},
     ("precision.backend", "torchao", "deskside")),
    ({"precision": {"name": "fp8"}, "model": {"num_experts": 8, "norm": "layernorm"}},
     ("precision.name", "rmsnorm", "bf16")),
    ({"precision": {"name": "fp8"}, "model": {"num_experts": 8, "mlp_bias": True}},
     ("precision.name", "biases", "bf16")),
    ({"model": {"hidden_act": "clamped_swiglu", "gated_mlp": False}}, ("model.hidden_act", "gated_mlp true")),
    ({"model": {"num_experts": 8, "parallel_residual": True}}, ("model.parallel_residual", "num_experts 0")),
    ({"model": {"norm_position": "post", "parallel_residual": True}}, ("model.parallel_residual", "use pre")),
    ({"model": {"qk_norm": False, "qk_norm_over": "projection"}}, ("model.qk_norm_over", "qk_norm true")),
    ({"model": {"rope_local_base_freq": 100.0}}, ("model.rope_local_base_freq", "window_pattern")),
    ({"precision": {"name": "fp8"}, "model": {"num_experts": 8, "moe_intermediate_size": 200}},
     ("model.moe_intermediate_size", "200", "16", "208")),
    ({"modle": {"hidden_size": 64}}, ("modle", "model")),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "words"), ERRORS, ids=[str(layer)[:60] for layer, _ in ERRORS])
def test_errors_are_one_line_with_key_and_remedy(layer: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        build([layer])
    line = str(error.value)
    assert "\n" not in line and len(line) < 250
    assert line.startswith(words[0]), line
    for word in words[1:]:
        assert word in line, line


def test_keeping_most_projections_leaves_the_rest() -> None:
    """In a fused weight, q_proj and up_proj keep the weight's other projections in BF16 too."""
    keep = ["q_proj", "o_proj", "up_proj", "down_proj"]
    for apart in ("fused_qkv", "fused_gate_up"):
        assert build(
            [{"precision": {"name": "fp8", "keep": keep}, "model": {apart: False}}]
        ).precision.quantized
    assert build([{"precision": {"name": "fp8", "keep": keep[1:]}}]).precision.quantized


@st.composite
def typos(draw: st.DrawFn) -> str:
    """Return the key with one character of its last word changed, omitted or doubled, or two of them swapped."""
    key = draw(st.sampled_from(option_keys()))
    head, _, leaf = key.rpartition(".")
    at = draw(st.integers(0, len(leaf) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_"))
    changed = draw(
        st.sampled_from(
            [
                leaf[:at] + letter + leaf[at + 1 :],
                leaf[:at] + leaf[at + 1 :],
                leaf[: at + 1] + leaf[at:],
                leaf[:at] + leaf[at : at + 2][::-1] + leaf[at + 2 :],
            ]
        )
    )
    return f"{head}.{changed}" if head else changed


@given(typos())
def test_a_key_is_suggested_for_a_typo(wrong: str) -> None:
    known = {*option_keys(), *(path[0] for path, _ in config_fields())}
    if wrong in known:
        return
    layer: Any = 1
    for part in reversed(wrong.split(".")):
        layer = {part: layer}
    with pytest.raises(UsageError) as error:
        build([layer])
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{wrong}: there is no such option; did you mean ")
    suggested = line.removesuffix("?").rsplit(" ", 1)[1]
    assert suggested in known


def test_the_suggested_key_is_the_right_one() -> None:
    """For long words with one letter omitted, the suggestion is nearly always the key itself."""
    random.seed(5)
    long = [key for key in option_keys() if len(key.rpartition(".")[2]) >= 6]
    right = 0
    for key in long:
        head, _, leaf = key.rpartition(".")
        at = random.randrange(len(leaf))
        layer: Any = {leaf[:at] + leaf[at + 1 :]: 1}
        for part in reversed(head.split(".") if head else []):
            layer = {part: layer}
        with pytest.raises(UsageError) as error:
            build([layer])
        right += f"did you mean {key}?" in str(error.value)
    assert right / len(long) > 0.95, right / len(long)


def test_the_resolved_configuration_reads_back() -> None:
    layers = [
        {"model": {"num_experts": 8, "num_experts_per_tok": 2}, "optim": {"betas": [0.8, 0.9]}},
        {"schedule": {"hours": 2, "warmup": "40 steps", "stages": [{"until": 1.0, "sequence_length": 512}]}},
        {
            "checkpoint": {"every": "100M tokens"},
            "data": {"weights": {"en": 2.0}},
            "evaluate": {"every": None},
        },
    ]
    config = build(layers)
    again = RunConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again == config
    assert again.model_dump_json() == config.model_dump_json()


def layer_with(path: tuple[str, ...], value: object) -> dict[str, Any]:
    """Return a layer with one key, and with the alternative that has the key."""
    if len(path) == 1:
        return {path[0]: value}
    if path[:2] == ("model", "rope_scaling"):
        required = {"factor": 8.0, "original_max_position_embeddings": 2048}
        return {"model": {"rope_scaling": {**required, path[2]: value}}}
    part, leaf = path
    chosen = {}
    for alternative in parts_of(RunConfig.model_fields[part].annotation):
        if "name" in alternative.model_fields and leaf in alternative.model_fields and leaf != "name":
            chosen = {"name": alternative.model_fields["name"].default}
    return {part: {**chosen, leaf: value}} if part in ("optim", "schedule") else {part: {leaf: value}}


LEAVES = [path for path, field in config_fields()]


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
@pytest.mark.parametrize("value", [True, [True], math.nan, math.inf, -math.inf, "???", {"?": 1}], ids=str)
def test_invalid_values_are_refused_for_every_key(path: tuple[str, ...], value: object) -> None:
    """The message starts with the key as written, and contains nothing of pydantic's."""
    key = ".".join(path)
    field = dict(config_fields())[path]
    takes = {True: bool, "???": str}.get(value) if isinstance(value, bool | str) else None
    kinds = (field.annotation, *get_args(field.annotation))
    if takes is not None and (takes in kinds or (takes is str and UserPath in kinds)):
        return
    if key == "data.sources" or (key == "data.weights" and value == {"?": 1}):
        return  # a list of arbitrary texts, a table with arbitrary names
    if path[0] == "track" and value is True:
        return  # true also gives the project's name: deskside
    with pytest.raises(UsageError) as caught:
        build([layer_with(path, value)])
    assert re.match(rf"{re.escape(key)}(\.\d+)?: ", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


def test_numbers_that_are_not_finite_inside_tables() -> None:
    for value, message in (
        (math.nan, "data.weights.en: must be a finite number"),
        (True, "data.weights: "),
    ):
        with pytest.raises(UsageError, match=message):
            build([{"data": {"weights": {"en": value}}}])
    with pytest.raises(UsageError, match=r"schedule\.stages\.0\.until: must be a number, not true or false"):
        build([{"schedule": {"stages": [{"until": True, "sequence_length": 512}]}}])
    with pytest.raises(
        UsageError, match=r"schedule\.warmup: a fraction of the run must be in \[0, 1\), not inf"
    ):
        build([{"schedule": {"warmup": "inf"}}])


@pytest.mark.parametrize("key", sorted(ModelConfig.model_fields))
def test_options_that_contradict_given_weights_are_refused(key: str) -> None:
    """Covers every key of the model, so that a new key needs a decision here."""
    own = build([{"model": {"num_hidden_layers": 4, "sliding_window": 64, "window_pattern": "SSL"}}]).model
    other = {
        "attention_bias": True, "attention_multiplier": 0.1, "attention_sinks": True, "attn_logit_softcapping": 9.0,
        "embedding_multiplier": 2.0, "parallel_residual": True, "qk_norm_over": "projection",
        "rope_local_base_freq": 5.0, "final_logit_softcapping": 9.0, "fused_gate_up": False, "fused_qkv": False,
        "gated_mlp": False, "head_dim": 32, "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.5,
        "intermediate_size": 512, "max_position_embeddings": 4096, "mlp_bias": True, "model_type": "llama",
        "norm": "layernorm", "norm_bias": True, "norm_eps": 1e-3, "norm_position": "post", "num_attention_heads": 6,
        "num_experts": 4, "num_hidden_layers": 2, "num_key_value_heads": 1, "position_embedding": "learned",
        "q_norm_init": 4.0, "qk_norm": False, "qkv_bias": True,
        "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 2048},
        "logits_scaling": 8.0, "partial_rotary_factor": 0.5, "residual_multiplier": 0.2, "rope_pattern": "RN",
        "rope_theta": 5.0, "sliding_window": 32, "tie_word_embeddings": True, "vocab_size": 512,
        "window_pattern": "SL",
    }  # fmt: skip
    moe_only = {"num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef"}
    moe_only |= {
        "scoring_func",
        "router_z_loss_coef",
        "router_bias_update_rate",
        "shared_expert_intermediate_size",
    }
    beside = {"norm_bias": {"norm": "layernorm"}, "num_experts": {"num_experts_per_tok": 2}}.get(key, {})
    if key in moe_only:  # it has no effect in a dense model, which is a different error
        return
    refuse_other_model(own, {"model": {key: getattr(own, key)}}, "runs/a")
    given = {"model": {**beside, key: other[key]}}
    if key in ("max_position_embeddings", "model_type", "rope_scaling"):
        refuse_other_model(own, given, "runs/a")
        return
    with pytest.raises(UsageError, match=r"^model\.\w+: the weights of runs/a are"):
        refuse_other_model(own, given, "runs/a")


def test_the_scaling_that_weights_were_trained_with_cannot_change() -> None:
    llama3 = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    own = build([{"model": {"rope_scaling": llama3}}]).model
    refuse_other_model(own, {"model": {"rope_scaling": {"factor": "32"}}}, "hf/llama")
    with pytest.raises(UsageError, match=r"^model\.rope_scaling: the weights of hf/llama are"):
        refuse_other_model(own, {"model": {"rope_scaling": {"factor": "8"}}}, "hf/llama")


def test_experts_for_dense_weights_need_upcycling() -> None:
    given = {"model": {"num_experts": 4, "num_experts_per_tok": 2}}
    with pytest.raises(UsageError, match=r"model\.num_experts: .* with 0, not 4; add --upcycle"):
        refuse_other_model(RunConfig().model, given, "runs/a", UPCYCLING)
    with pytest.raises(UsageError, match=r"model\.num_experts: .* with 0, not 4; leave the option out"):
        refuse_other_model(RunConfig().model, given, "runs/a")  # `deskside sft` has no --upcycle
    with pytest.raises(UsageError, match=r"model\.hidden_size: .*; leave the option out"):
        refuse_other_model(
            RunConfig().model, {"model": {"hidden_size": 64, **given["model"]}}, "runs/a", UPCYCLING
        )


def test_the_weights_of_the_routers_losses_may_change() -> None:
    own = build([{"model": {"num_experts": 4, "num_experts_per_tok": 2}}]).model
    refuse_other_model(own, {"model": {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}}, "runs/a")
    with pytest.raises(
        UsageError, match=r"model\.norm_topk_prob: .* with true, not false; leave the option out"
    ):
        refuse_other_model(own, {"model": {"norm_topk_prob": False}}, "runs/a")


def test_a_part_that_one_layer_gives_as_a_value_is_one_line() -> None:
    for options in ({"name": "adamw"}, {"lr": 0.01}):
        with pytest.raises(UsageError, match="optim: is given both as one value and as a table"):
            build([{"optim": "adamw"}, {"optim": options}])


def test_yarn_is_set_key_by_key_on_top_of_a_model_without_it() -> None:
    """`--init` sets YaRN this way, because the layers of a resolved model have rope_scaling None."""
    keys = {"factor": 8.0, "original_max_position_embeddings": 2048}
    layers = resolved_layers("model", RunConfig().model.model_dump(mode="json"))
    longer = {"model": {"rope_scaling": keys, "max_position_embeddings": 16384}}
    yarn = build([*layers, longer]).model.rope_scaling
    assert yarn is not None and (yarn.factor, yarn.original_max_position_embeddings) == (8.0, 2048)
    refuse_other_model(RunConfig().model, longer, "runs/base")
    with pytest.raises(UsageError, match=r"factor: is missing; set it with --model\.rope_scaling\.factor$"):
        build([{"model": {"rope_scaling": {"original_max_position_embeddings": 2048}}}])
    with pytest.raises(UsageError, match=r"stages\.0\.until: is missing; add it to the table$"):
        build([{"schedule": {"stages": [{"sequence_length": 512}]}}])
    with pytest.raises(UsageError, match=r"model\.rope_scaling: learned positions"):
        build([{"model": {"rope_scaling": keys, "position_embedding": "learned"}}])
    with pytest.raises(UsageError, match=r"model\.rope_scaling\.beta_fast: 0\.5 is below"):
        build([{"model": {"rope_scaling": {**keys, "beta_fast": 0.5}}}])
