"""Parameters and FLOPs compared with transformers' models and torch's FLOP counter."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from deskside.budget.adapters import training_flops_per_token
from deskside.budget.shape import (
    active_params,
    attention_span,
    flops_per_token,
    kv_bytes_per_token,
    matmul_params,
    num_params,
    parameter_groups,
)
from deskside.budget.step_spec import AdapterSpec
from deskside.config.model import ModelConfig
from deskside.model.transformer import Transformer
from deskside.weights.hf_config import to_hf_config

SHAPES: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 3, "num_key_value_heads": 12, "tie_word_embeddings": True},
    {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 96,
        "intermediate_size": 1000,
    },
    {"num_hidden_layers": 2, "attention_bias": True, "vocab_size": 1000},
]
MOE = {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
SIGMOID = {**MOE, "scoring_func": "sigmoid", "shared_expert_intermediate_size": 192}
SHARED_EXPERT = {**MOE, "qk_norm": False, "shared_expert_intermediate_size": 80}
SMALL = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 160,
}  # fmt: skip
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "tie_word_embeddings", "attention_bias",
)  # fmt: skip
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def qwen3(shape: ModelConfig) -> PretrainedConfig:
    given = {key: getattr(shape, key) for key in SHARED}
    if shape.num_experts:
        return Qwen3MoeConfig(**given, **{key: getattr(shape, key) for key in EXPERTS}, decoder_sparse_step=1)
    return Qwen3Config(**given)


def on_meta(config: PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("given", [*SHAPES, MOE, {**MOE, "num_experts": 128, "num_experts_per_tok": 8}])
def test_parameters_equal_transformers_qwen3(given: dict[str, Any]) -> None:
    shape = ModelConfig(**given)
    assert num_params(shape) == count(on_meta(qwen3(shape)))


@pytest.mark.parametrize("given", [SIGMOID, SHARED_EXPERT])
def test_parameters_with_a_shared_expert_equal_transformers(given: dict[str, Any]) -> None:
    shape = ModelConfig(**given)
    theirs = AutoConfig.for_model(**to_hf_config(shape))
    biases = shape.num_hidden_layers * shape.num_experts if shape.scoring_func == "sigmoid" else 0
    assert num_params(shape) == count(on_meta(theirs)) + biases  # buffers in transformers
    idle = (shape.num_experts - 2) * 3 * shape.hidden_size * shape.moe_intermediate_size
    assert active_params(shape) == num_params(shape) - shape.num_hidden_layers * idle


def test_parameters_equal_transformers_gpt2() -> None:
    shape = ModelConfig(
        vocab_size=50257, max_position_embeddings=1024, num_key_value_heads=12, intermediate_size=3072,
        position_embedding="learned", hidden_act="gelu_new", gated_mlp=False, mlp_bias=True, attention_bias=True,
        norm="layernorm", norm_bias=True, qk_norm=False, tie_word_embeddings=True,
    )  # fmt: skip
    assert num_params(shape) == count(on_meta(GPT2Config())) == 124_439_808
    assert parameter_groups(shape)["position"] == 1024 * 768


@pytest.mark.parametrize(
    "given",
    [
        {}, MOE, SIGMOID, SHARED_EXPERT, {"norm_position": "post", "norm": "layernorm", "norm_bias": True},
        {"mlp_bias": True, "gated_mlp": False}, {"norm_position": "sandwich"},
        {"norm_position": "output", "qk_norm_over": "projection"},
        {**MOE, "mlp_bias": True, "attention_sinks": True, "hidden_act": "clamped_swiglu"},
        {"position_embedding": "learned", "qk_norm": False}, {"tie_word_embeddings": True}, {"norm": "layernorm"},
        {"norm": "layernorm", "qk_norm": True, "attention_bias": True, "fused_qkv": False},
    ],
)  # fmt: skip
def test_groups_equal_our_model(given: dict[str, Any]) -> None:
    shape = ModelConfig(**{**SMALL, **given})
    with torch.device("meta"):
        model = Transformer(shape)
    assert parameter_groups(shape) == model.num_params()
    assert num_params(shape) == count(model)


def counted_flops(model: torch.nn.Module, tokens_BT: torch.Tensor) -> int:
    """Return the FLOPs of forward and backward, without the rotary angles, which
    older transformers compute by a matmul.
    """
    with FlopCounterMode(display=False) as counter:
        model(tokens_BT).logits.sum().backward()
    angles = counter.get_flop_counts().get(f"{type(model).__name__}.model.rotary_emb", {})
    return counter.get_total_flops() - sum(angles.values())


@pytest.mark.parametrize("given", SHAPES)
def test_flops_equal_the_counter_of_torch(given: dict[str, Any]) -> None:
    """The counter includes the full square of attention, which equals our convention at twice the sequence length."""
    shape = ModelConfig(**given)
    tokens = 48
    model = on_meta(qwen3(shape))
    counted = counted_flops(model, torch.zeros(1, tokens, dtype=torch.long, device="meta"))
    assert counted == flops_per_token(shape, 2 * tokens) * tokens


def test_flops_of_experts_equal_the_counter_of_torch() -> None:
    shape = ModelConfig(**{**SMALL, **MOE})
    config = qwen3(shape)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert counted_flops(model, torch.arange(32)[None]) == flops_per_token(shape, 64) * 32


@pytest.mark.parametrize("tables", [(), ("lm_head",)], ids=["adapters", "and head"])
def test_flops_with_adapters_equal_the_counter_of_torch(tables: tuple[str, ...]) -> None:
    """The counter runs on PEFT's model. Only the first block differs: its input is
    frozen, so q, k and v give it no gradient.
    """
    shape, tokens, rank = ModelConfig(**SMALL), 48, 8
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    options = LoraConfig(r=rank, target_modules=list(names), modules_to_save=list(tables) or None)
    model = get_peft_model(on_meta(qwen3(shape)), options)
    with torch.device("meta"):
        batch = torch.zeros(1, tokens, dtype=torch.long)
    counted = counted_flops(model.base_model.model, batch) / tokens
    adapter = AdapterSpec(rank, names, "bf16", tables=tables)
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    first = 2 * shape.hidden_size * (q + 2 * kv) + 2 * 3 * rank * shape.hidden_size
    assert counted == training_flops_per_token(shape, 2 * tokens, adapter) - first
    assert training_flops_per_token(shape, tokens, None) == flops_per_token(shape, tokens)


def test_active_parameters_are_the_chosen_experts() -> None:
    shape = ModelConfig(**{**SMALL, **MOE})
    assert num_params(shape) - active_params(shape) == 2 * (6 - 2) * 3 * 64 * 96
    assert active_params(ModelConfig()) == num_params(ModelConfig())
    dense = ModelConfig()
    groups = parameter_groups(dense)
    assert matmul_params(dense) == groups["attention"] + groups["mlp"] + groups["head"]


@given(st.integers(1, 400), st.integers(1, 400))
def test_span_of_a_window_by_brute_force(tokens: int, window: int) -> None:
    exact = sum(min(i + 1, window) for i in range(tokens)) / tokens
    assert abs(attention_span(tokens, window) - exact) <= 0.5
    assert attention_span(tokens, tokens) == attention_span(tokens, None) == tokens / 2


def test_windows_count_by_layer() -> None:
    full = ModelConfig(num_hidden_layers=4)
    windowed = ModelConfig(num_hidden_layers=4, window_pattern="SSSL", sliding_window=256)
    saved = 12 * 12 * 64 * 3 * (1024 - (256 - 256**2 / 4096))
    assert flops_per_token(full, 2048) - flops_per_token(windowed, 2048) == pytest.approx(saved)


def test_kv_cache_bytes() -> None:
    assert kv_bytes_per_token(ModelConfig(), 2) == 12 * 2 * 3 * 64 * 2
