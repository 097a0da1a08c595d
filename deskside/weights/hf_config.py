"""Conversion between a Hugging Face config.json and ModelConfig. Unsupported options are refused by name."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deskside.config.base import first_problem
from deskside.config.model import ModelConfig, YarnConfig
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf_families import FAMILIES, family_of

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu2": "relu2",
}
# Options that config.json must have, except that GPT-2 has its own names for some.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
# GPT-2's names of the options.
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}


def from_hf_config(source: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig for the content of a published config.json.

    Raises UsageError for an unsupported architecture or option, and RunError for missing or invalid values.
    """
    model_type = source.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(f"model_type '{model_type}' is not supported; use one of {', '.join(FAMILIES)}")
    try:
        return _gpt2(source) if model_type == "gpt2" else _decoder(source, model_type)
    except KeyError as error:
        raise RunError(f"config.json of a {model_type} model lacks {error}; is it complete?") from error
    except ValidationError as error:
        raise RunError(f"config.json describes an impossible model: {first_problem(error)}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(f"config.json has an invalid value ({error}); is it damaged?") from error


def _decoder(source: Mapping[str, Any], model_type: str) -> ModelConfig:
    heads, layers = source["num_attention_heads"], source["num_hidden_layers"]
    if (
        not isinstance(layers, int) or layers > 10_000
    ):  # a damaged file must not allocate a list of any length
        raise ValueError(f"num_hidden_layers: {layers!r}")
    default_head_dim = 128 if model_type == "qwen3" else source["hidden_size"] // heads
    values = {
        **FAMILIES[model_type].fixed,
        **{name: source[name] for name in (*_SIZES, "intermediate_size")},
        "num_key_value_heads": source.get("num_key_value_heads") or heads,
        "head_dim": source.get("head_dim") or default_head_dim,
        **_rope(source),
        "hidden_act": _activation(source.get("hidden_act", "silu")),
        "norm_eps": source.get("rms_norm_eps", 1e-6),
        "attention_bias": source.get("attention_bias", False),
        "mlp_bias": source.get("mlp_bias", False),
        "tie_word_embeddings": source.get("tie_word_embeddings", False),
        "initializer_range": source.get("initializer_range", 0.02),
    }
    windows = _windows(source, model_type, layers)
    if any(windows):
        values["sliding_window"] = source["sliding_window"]
        values["window_pattern"] = _shortest_pattern("".join("S" if window else "L" for window in windows))
    if model_type in ("qwen2_moe", "qwen3_moe"):
        if source.get("mlp_only_layers") or source.get("decoder_sparse_step", 1) != 1:
            raise UsageError(
                "mlp_only_layers, decoder_sparse_step: a mix of dense and expert layers is not supported"
            )
        values |= {
            "num_experts": source.get("num_experts") or source["num_local_experts"],
            "num_experts_per_tok": source["num_experts_per_tok"],
            "moe_intermediate_size": source["moe_intermediate_size"],
            "norm_topk_prob": source.get("norm_topk_prob", False),
            "router_aux_loss_coef": source.get("router_aux_loss_coef", 0.001),
        }
    if model_type == "qwen2_moe":
        if source.get("qkv_bias", True):
            raise UsageError("qkv_bias: only false is supported in a Qwen2-MoE")
        values["shared_expert_intermediate_size"] = source["shared_expert_intermediate_size"]
    if model_type == "dots1":
        values |= _dots1_experts(source)
    return ModelConfig(**values)


def _dots1_experts(source: Mapping[str, Any]) -> dict[str, Any]:
    for name, needed in (
        ("n_group", 1),
        ("topk_group", 1),
        ("routed_scaling_factor", 1.0),
        ("first_k_dense_replace", 0),
    ):
        if source.get(name, needed) != needed:
            raise UsageError(f"{name}: {source[name]} is not supported; only {needed} is")
    return {
        "num_experts": source["n_routed_experts"],
        "num_experts_per_tok": source["num_experts_per_tok"],
        "moe_intermediate_size": source["moe_intermediate_size"],
        "norm_topk_prob": source.get("norm_topk_prob", False),
        "scoring_func": "sigmoid",
        "shared_expert_intermediate_size": (source.get("n_shared_experts") or 0)
        * source["moe_intermediate_size"],
    }


def _gpt2(source: Mapping[str, Any]) -> ModelConfig:
    for name, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if source.get(name, needed) != needed:
            raise UsageError(f"{name}: only {str(needed).lower()} is supported")
    return ModelConfig(
        **FAMILIES["gpt2"].fixed,
        **{name: source[_GPT2_NAMES.get(name, name)] for name in _SIZES},
        num_key_value_heads=source["n_head"],
        head_dim=source["n_embd"] // source["n_head"],
        intermediate_size=source.get("n_inner") or 4 * source["n_embd"],
        hidden_act=_activation(source.get("activation_function", "gelu_new")),
        norm_eps=source.get("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=source.get("tie_word_embeddings", True),
        initializer_range=source.get("initializer_range", 0.02),
    )


def _rope(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_theta and rope_scaling, as transformers reads them from `rope_parameters` or from older names."""
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise UsageError(
            f"rope_parameters: rope_type '{kind}' is not supported; only 'default' and 'yarn' are"
        )
    if rope.get("partial_rotary_factor", source.get("partial_rotary_factor")) not in (None, 1):
        raise UsageError("partial_rotary_factor: only 1 is supported")
    values: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", source.get("rope_theta", 10000.0)))}
    if kind == "yarn":
        positions = source["max_position_embeddings"]
        original = source.get("original_max_position_embeddings") or rope.get(
            "original_max_position_embeddings", positions
        )
        yarn = {name: rope[name] for name in YarnConfig.model_fields if rope.get(name) is not None}
        factor = rope["factor"] if rope["factor"] is not None else positions / original
        values["rope_scaling"] = yarn | {
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    return values


def _windows(source: Mapping[str, Any], model_type: str, layers: int) -> list[bool]:
    """Return for each layer whether it uses a sliding window."""
    if model_type == "llama" or not source.get("sliding_window"):
        return [False] * layers
    # dots.llm1 has no option use_sliding_window.
    if model_type != "dots1" and not source.get("use_sliding_window"):
        return [False] * layers
    if model_type == "qwen3_moe":
        return [True] * layers
    types = source.get("layer_types")
    if types is None and model_type == "qwen2_moe":
        raise UsageError("use_sliding_window: a Qwen2-MoE with windows needs layer_types")
    if types is None:
        first = source.get("max_window_layers", 62 if model_type == "dots1" else 28)
        return [layer >= first for layer in range(layers)]
    return [kind == "sliding_attention" for kind in types]


def _shortest_pattern(pattern: str) -> str:
    """Return the shortest string that gives the pattern when repeated and cut to its length: SLSLS -> SL."""
    for length in range(1, len(pattern)):
        unit = pattern[:length]
        if (unit * len(pattern))[: len(pattern)] == pattern:
            return unit
    return pattern


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UsageError(f"hidden_act '{name}' is not supported; use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json for a configuration, without the fields of tokenizer and dtype."""
    family = family_of(config)
    hidden, heads = config.hidden_size, config.num_attention_heads
    if family.model_type == "llama" and hidden % heads:
        raise UsageError(
            f"transformers cannot load a Llama whose hidden_size ({hidden}) is not a multiple "
            f"of num_attention_heads ({heads}); change one of them, or use qk_norm true (Qwen3)"
        )

    def fields(*names: str) -> dict[str, Any]:
        return {name: getattr(config, name) for name in names}

    result = {"architectures": [family.architecture], "model_type": family.model_type, "use_cache": True}
    result |= fields("vocab_size", "tie_word_embeddings", "initializer_range")
    if family.model_type == "gpt2":
        return {
            **result,
            **{gpt2_name: getattr(config, name) for name, gpt2_name in _GPT2_NAMES.items()},
            "n_ctx": config.max_position_embeddings,  # the old name, which llama.cpp's converter needs
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    result |= fields(
        *_SIZES, "intermediate_size", "num_key_value_heads", "head_dim", "hidden_act", "attention_bias"
    )
    scaling: dict[str, Any] = {}
    if config.rope_scaling is not None:
        scaling = {"rope_type": "yarn", **config.rope_scaling.model_dump(mode="json", exclude_none=True)}
    result |= {
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        # The first two are for transformers before version 5.
        "rope_theta": config.rope_theta,
        **({"rope_scaling": scaling} if scaling else {}),
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **scaling},
    }
    if family.model_type == "llama":
        return result | fields("mlp_bias")
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    result |= {
        "use_sliding_window": any(windows),
        "sliding_window": config.sliding_window if any(windows) else None,
    }
    if config.num_experts:
        result |= _hf_experts(config, family.model_type)
    if family.model_type == "qwen3_moe":
        return result
    return result | {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "max_window_layers": windows.index(config.sliding_window) if any(windows) else len(windows),
    }


def _hf_experts(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the fields of config.json about experts and their router."""
    result: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    }
    shared = config.shared_expert_intermediate_size
    if model_type == "dots1":
        result |= {"n_routed_experts": config.num_experts, "first_k_dense_replace": 0}
        result["n_shared_experts"] = shared // config.moe_intermediate_size
        return result | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    result |= {"num_experts": config.num_experts, "router_aux_loss_coef": config.router_aux_loss_coef}
    result |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if model_type == "qwen2_moe":
        result |= {"qkv_bias": False, "shared_expert_intermediate_size": shared}
    return result
