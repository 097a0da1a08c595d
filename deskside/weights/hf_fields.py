"""Fields of config.json, by the options of ModelConfig that they correspond to, and defaults of its sliding windows."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from deskside.config.model import INITIALIZER_RANGE, ModelConfig
from deskside.utils.errors import UsageError
from deskside.weights.hf_family import Constant, Field, shortest_pattern

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu2": "relu2",
}


def read_activation(name: Any, source: Mapping[str, Any]) -> str:
    """Return our name of an activation. Raises UsageError for others."""
    if name not in _ACTIVATIONS:
        raise UsageError(f"hidden_act '{name}' is not supported; use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def same(*names: str) -> dict[str, Field]:
    """Return required fields that have the same name as our option."""
    return {name: Field(name) for name in names}


# Fields

# None stands for a default that depends on the run, too (`RunConfig.embedding_std`).
NEW_EMBEDDINGS = Field(
    "initializer_range",
    INITIALIZER_RANGE,
    write=lambda value, config: INITIALIZER_RANGE if value is None else value,
)


def key_value_heads(missing: int) -> dict[str, Field]:
    """Return the field of the key-value heads for a family in which a file without it has `missing` of them.

    Null is as many as heads.
    """
    name = "num_key_value_heads"
    return {name: Field(name, lambda source: source["num_attention_heads"] if name in source else missing)}


HEADS = {
    **same(
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"
    ),
    "num_key_value_heads": Field("num_key_value_heads", lambda source: source["num_attention_heads"]),
    "head_dim": Field("head_dim", None),
}
DECODER = {
    **HEADS,
    **same("intermediate_size"),
    "hidden_act": Field("hidden_act", "silu", read=read_activation),
    "norm_eps": Field("rms_norm_eps", 1e-6),
    "attention_bias": Field("attention_bias", False),
    "tie_word_embeddings": Field("tie_word_embeddings", False),
    "initializer_range": NEW_EMBEDDINGS,
}
EXPERTS = {
    "num_experts": Field("num_experts", older="num_local_experts"),
    **same("num_experts_per_tok", "moe_intermediate_size"),
    "norm_topk_prob": Field("norm_topk_prob", False),
    "router_aux_loss_coef": Field("router_aux_loss_coef", 0.001),
}
GEMMA = {
    **DECODER,
    **key_value_heads(4),
    "head_dim": Field("head_dim", 256),
    "hidden_act": Field(
        "hidden_activation",
        "gelu_new",
        read=read_activation,
        write=lambda name, config: "gelu_pytorch_tanh" if name == "gelu_new" else name,
    ),
    "tie_word_embeddings": Field("tie_word_embeddings", True),
    "attention_multiplier": Field(
        "query_pre_attn_scalar",
        256**-0.5,
        read=lambda scalar, source: scalar**-0.5,
        write=lambda factor, config: config.head_dim if factor is None else round(factor**-2),
    ),
    # Embeddings are multiplied by the square root of their width.
    "embedding_multiplier": Field(
        "hidden_size",
        read=lambda width, source: width**0.5,
        write=lambda factor, config: config.hidden_size,
    ),
}
OLMO = {
    **{name: value for name, value in DECODER.items() if name != "head_dim"},
    "norm_eps": Field("rms_norm_eps", 1e-5),
}
NEOX = {
    **{name: value for name, value in DECODER.items() if name != "head_dim"},
    "num_key_value_heads": Field("num_attention_heads"),
    "hidden_act": Field("hidden_act", "gelu", read=read_activation),
    "norm_eps": Field("layer_norm_eps", 1e-5),
    "attention_bias": Field("attention_bias", True),
    "parallel_residual": Field("use_parallel_residual", True),
}
GPT_OSS = {
    **{name: value for name, value in DECODER.items() if name not in ("hidden_act", "intermediate_size")},
    **key_value_heads(8),
    "head_dim": Field("head_dim", 64),
    "norm_eps": Field("rms_norm_eps", 1e-5),
    "attention_bias": Field("attention_bias", True),
    "num_experts": Field("num_local_experts", older="num_experts"),
    "num_experts_per_tok": Field("num_experts_per_tok", older="experts_per_token"),
    # router_aux_loss_coef (0.9) is not read: transformers adds this loss only with output_router_logits.
    "moe_intermediate_size": Field("intermediate_size"),
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _rope_pattern(layers: Any, source: Mapping[str, Any]) -> str | None:
    """Return our pattern for `no_rope_layers`, which has 1 for a layer with RoPE and 0 for one without."""
    if len(layers) != source["num_hidden_layers"]:
        raise ValueError(f"no_rope_layers: {len(layers)} layers of {source['num_hidden_layers']}")
    return shortest_pattern("".join("R" if layer else "N" for layer in layers)) if 0 in layers else None


def _every_nth_without_rope(source: Mapping[str, Any]) -> str | None:
    every = source.get("no_rope_layer_interval") or 4
    return "R" * (every - 1) + "N" if source["num_hidden_layers"] >= every else None


def _no_rope_layers(pattern: str | None, config: ModelConfig) -> list[int]:
    return [int(config.layer_rope(layer) is not None) for layer in range(config.num_hidden_layers)]


SMOLLM3 = {
    **DECODER,
    **key_value_heads(4),
    "mlp_bias": Field("mlp_bias", False),
    "tie_word_embeddings": Field("tie_word_embeddings", True),
    "rope_pattern": Field(
        "no_rope_layers", _every_nth_without_rope, read=_rope_pattern, write=_no_rope_layers
    ),
}
GRANITE = {
    **DECODER,
    "mlp_bias": Field("mlp_bias", False),
    **{name: Field(name, 1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")},
    "attention_multiplier": Field(
        "attention_multiplier",
        1.0,
        write=lambda factor, config: config.head_dim**-0.5 if factor is None else factor,
    ),
}
NO_DROPOUT = {"attention_dropout": 0.0}
NO_PADDING = {"pad_token_id": None}  # transformers' default may be above the vocabulary
ALL_LAYERS_HAVE_EXPERTS = {"mlp_only_layers": Constant([], []), "decoder_sparse_step": Constant(1, 1)}


def without(fields: Mapping[str, Field], *names: str) -> dict[str, Field]:
    """Return the fields without some options, for a family that lacks them."""
    return {name: value for name, value in fields.items() if name not in names}


def softcap(name: str, default: float | None) -> Field:
    """Return the field of a soft cap. Null in config.json is no cap; `default` is that of a file without the field."""
    return Field(name, lambda source: None if name in source else default)


def _whole_scalar(config: ModelConfig) -> bool:
    """Return True if the factor of the scores is 1 / sqrt(n) for an integer n, as query_pre_attn_scalar requires."""
    factor = config.attention_multiplier
    if factor is None:
        return True
    scalar = round(factor**-2)
    return scalar > 0 and scalar**-0.5 == factor


DIVISIBLE_HIDDEN_SIZE = (
    "hidden_size that is not a multiple of num_attention_heads",
    lambda config: config.hidden_size % config.num_attention_heads == 0,
)
WHOLE_SCALAR = ("attention_multiplier that is not 1 / sqrt(n) for an integer n", _whole_scalar)
SCALED_EMBEDDINGS = (
    "embedding_multiplier that is not sqrt(hidden_size)",
    lambda config: math.isclose(config.embedding_multiplier, config.hidden_size**0.5, rel_tol=1e-6),
)


# Windows


def all_but_every(period: int, name: str | None = None) -> Callable[[Mapping[str, Any], int], list[bool]]:
    """Return the default of families in which every `period`-th layer has full attention.

    name: of a field with another period.
    """

    def windows(source: Mapping[str, Any], layers: int) -> list[bool]:
        every = period if name is None else source.get(name) or period
        return [(layer + 1) % every != 0 for layer in range(layers)]

    return windows


def layers_without_rope(source: Mapping[str, Any], layers: int) -> list[bool]:
    """Return the default of SmolLM3: a window in the layers without RoPE."""
    pattern = SMOLLM3["rope_pattern"].value(source) or "R"
    return [pattern[layer % len(pattern)] == "N" for layer in range(layers)]


def from_layer(first: int) -> Callable[[Mapping[str, Any], int], list[bool]]:
    """Return the default of `layer_types` of families with `max_window_layers`, whose own default is `first`."""

    def windows(source: Mapping[str, Any], layers: int) -> list[bool]:
        start = source.get("max_window_layers", first)
        return [layer >= start for layer in range(layers)]

    return windows


def every_layer(source: Mapping[str, Any], layers: int) -> list[bool]:
    """Return the default of families in which every layer has a window."""
    return [True] * layers


def alternate_layers(source: Mapping[str, Any], layers: int) -> list[bool]:
    """Return the default of Qwen2-MoE: every other layer up to `max_window_layers`."""
    stop = source.get("max_window_layers", 28)
    return [layer % 2 == 0 and layer < stop for layer in range(layers)]
