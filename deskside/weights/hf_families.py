"""The supported Hugging Face architectures as a table. A new family is one entry of `_FAMILIES`.

An entry says how config.json and the names of the tensors correspond to ModelConfig and to our logical names
(ops/logical.py), for import and export alike. Logical names with the same Hugging Face name are stacked in one tensor,
in the order of the model (q, k, v; gate, up).
"""

from collections.abc import Callable, Mapping
from typing import Any

from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError
from deskside.weights.hf_family import Constant, Family, Field, Windows, unsupported_options

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu2": "relu2",
}


def _read_activation(name: Any, source: Mapping[str, Any]) -> str:
    if name not in _ACTIVATIONS:
        raise UsageError(f"hidden_act '{name}' is not supported; use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _same(*names: str) -> dict[str, Field]:
    """Return required fields that have the same name as our option."""
    return {name: Field(name) for name in names}


# Fields

_HEADS = {
    **_same(
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"
    ),
    "num_key_value_heads": Field("num_key_value_heads", lambda source: source["num_attention_heads"]),
    "head_dim": Field("head_dim", None),
}
_DECODER_FIELDS = {
    **_HEADS,
    **_same("intermediate_size"),
    "hidden_act": Field("hidden_act", "silu", read=_read_activation),
    "norm_eps": Field("rms_norm_eps", 1e-6),
    "attention_bias": Field("attention_bias", False),
    "tie_word_embeddings": Field("tie_word_embeddings", False),
    "initializer_range": Field("initializer_range", 0.02),
}
_EXPERT_FIELDS = {
    "num_experts": Field("num_experts", older="num_local_experts"),
    **_same("num_experts_per_tok", "moe_intermediate_size"),
    "norm_topk_prob": Field("norm_topk_prob", False),
    "router_aux_loss_coef": Field("router_aux_loss_coef", 0.001),
}
_GEMMA_FIELDS = {
    **_DECODER_FIELDS,
    "head_dim": Field("head_dim", 256),
    "hidden_act": Field(
        "hidden_activation",
        "gelu_new",
        read=_read_activation,
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
        write=lambda factor, config: round(factor**2),
    ),
}
_OLMO_FIELDS = {
    **{name: value for name, value in _DECODER_FIELDS.items() if name != "head_dim"},
    "norm_eps": Field("rms_norm_eps", 1e-5),
}
_NO_DROPOUT = {"attention_dropout": 0.0}
_ALL_LAYERS_HAVE_EXPERTS = {"mlp_only_layers": Constant([], []), "decoder_sparse_step": Constant(1, 1)}


def without(fields: Mapping[str, Field], *names: str) -> dict[str, Field]:
    """Return the fields without some options, for a family that lacks them."""
    return {name: value for name, value in fields.items() if name not in names}


def _softcap(name: str, default: float | None) -> Field:
    """Return the field of a soft cap. Null in config.json is no cap; `default` is that of a file without the field."""
    return Field(name, lambda source: None if name in source else default)


def _whole_scalar(config: ModelConfig) -> bool:
    """Return True if transformers, whose query_pre_attn_scalar is an integer, has the factor of the scores."""
    factor = config.attention_multiplier
    return factor is None or round(factor**-2) ** -0.5 == factor


_DIVISIBLE_HIDDEN_SIZE = (
    "hidden_size that is not a multiple of num_attention_heads",
    lambda config: config.hidden_size % config.num_attention_heads == 0,
)
_WHOLE_SCALAR = ("attention_multiplier that is not 1 / sqrt(n) for an integer n", _whole_scalar)


# Windows


def _all_but_every(period: int) -> Callable[[Mapping[str, Any], int], list[bool]]:
    """Return the default of families in which every `period`-th layer has full attention."""

    def windows(source: Mapping[str, Any], layers: int) -> list[bool]:
        every = source.get("sliding_window_pattern") or period
        return [(layer + 1) % every != 0 for layer in range(layers)]

    return windows


def _from_layer(first: int) -> Callable[[Mapping[str, Any], int], list[bool]]:
    """Return the default of `layer_types` of families with `max_window_layers`, whose own default is `first`."""

    def windows(source: Mapping[str, Any], layers: int) -> list[bool]:
        start = source.get("max_window_layers", first)
        return [layer >= start for layer in range(layers)]

    return windows


def _every_layer(source: Mapping[str, Any], layers: int) -> list[bool]:
    return [True] * layers


def _alternate_layers(source: Mapping[str, Any], layers: int) -> list[bool]:
    """Return the default of Qwen2-MoE: every other layer up to `max_window_layers`."""
    stop = source.get("max_window_layers", 28)
    return [layer % 2 == 0 and layer < stop for layer in range(layers)]


# Names of tensors

_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_DECODER = {
    "embed": "model.embed_tokens",
    "layers.{}.attn.norm": "model.layers.{}.input_layernorm",
    **{f"layers.{{}}.attn.{x}_proj": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
    "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
_QK_NORM = {f"layers.{{}}.attn.{x}_norm": f"model.layers.{{}}.self_attn.{x}_norm" for x in "qk"}
_MLP = {f"layers.{{}}.mlp.{name}": f"model.layers.{{}}.mlp.{name}" for name in _MLP_PROJECTIONS}
_OUTPUT_NORMS = {
    "layers.{}.attn.output_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.output_norm": "model.layers.{}.post_feedforward_layernorm",
}
_GEMMA2 = {
    **_DECODER,
    **_MLP,
    **_OUTPUT_NORMS,
    "layers.{}.mlp.norm": "model.layers.{}.pre_feedforward_layernorm",
}
_OLMO2 = {
    **{name: value for name, value in _DECODER.items() if not name.startswith("layers") or "proj" in name},
    **_MLP,
    **_QK_NORM,
    **_OUTPUT_NORMS,
}
_EXPERTS = {
    "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
    **{
        f"layers.{{}}.mlp.experts.{{}}.{x}": f"model.layers.{{}}.mlp.experts.{{}}.{x}"
        for x in _MLP_PROJECTIONS
    },
}
_DOTS_SHARED_EXPERT = {
    f"layers.{{}}.mlp.shared_expert.{x}": f"model.layers.{{}}.mlp.shared_experts.{x}"
    for x in _MLP_PROJECTIONS
}
_QWEN_SHARED_EXPERT = {
    **{
        f"layers.{{}}.mlp.shared_expert.{x}": f"model.layers.{{}}.mlp.shared_expert.{x}"
        for x in _MLP_PROJECTIONS
    },
    "layers.{}.mlp.shared_expert.token_gate": "model.layers.{}.mlp.shared_expert_gate",
}
_GPT2 = {
    "embed": "transformer.wte",
    "position": "transformer.wpe",
    "layers.{}.attn.norm": "transformer.h.{}.ln_1",
    # Hugging Face stacks q, k and v in this order.
    **{f"layers.{{}}.attn.{x}_proj": "transformer.h.{}.attn.c_attn" for x in "qkv"},
    "layers.{}.attn.o_proj": "transformer.h.{}.attn.c_proj",
    "layers.{}.mlp.norm": "transformer.h.{}.ln_2",
    "layers.{}.mlp.up_proj": "transformer.h.{}.mlp.c_fc",
    "layers.{}.mlp.down_proj": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}

_MIXTRAL_EXPERTS = {
    "layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
    **{
        f"layers.{{}}.mlp.experts.{{}}.{x}": f"model.layers.{{}}.block_sparse_moe.experts.{{}}.{w}"
        for x, w in zip(_MLP_PROJECTIONS, ("w1", "w3", "w2"), strict=True)
    },
}
_PHI3 = {
    **_DECODER,
    **{f"layers.{{}}.attn.{x}_proj": "model.layers.{}.self_attn.qkv_proj" for x in "qkv"},
    **{f"layers.{{}}.mlp.{x}_proj": "model.layers.{}.mlp.gate_up_proj" for x in ("gate", "up")},
    "layers.{}.mlp.down_proj": "model.layers.{}.mlp.down_proj",
}

# The first family that has all options of a ModelConfig is its default.
_FAMILIES = (
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {**_DECODER, **_QK_NORM, **_MLP},
        {**_DECODER_FIELDS, "head_dim": Field("head_dim", 128)},
        {"qk_norm": True},
        written=_NO_DROPOUT,
        windows=Windows(_from_layer(28), 4096, "use_sliding_window", first_layer=True),
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        {**_DECODER, **_MLP},
        {**_DECODER_FIELDS, "mlp_bias": Field("mlp_bias", False)},
        {"qk_norm": False},
        written=_NO_DROPOUT,
        conditions=(_DIVISIBLE_HIDDEN_SIZE,),
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {**_DECODER, **_MLP},
        without(_DECODER_FIELDS, "attention_bias"),
        {"qk_norm": False, "qkv_bias": True},
        written=_NO_DROPOUT,
        windows=Windows(_from_layer(28), 4096, "use_sliding_window", first_layer=True),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        {**_DECODER, **_MLP},
        without(_DECODER_FIELDS, "attention_bias"),
        {"qk_norm": False},
        written=_NO_DROPOUT,
        windows=Windows(_every_layer, 4096, by_layer=False),
    ),
    Family(
        "ministral",
        "MinistralForCausalLM",
        {**_DECODER, **_MLP},
        without(_DECODER_FIELDS, "attention_bias"),
        {"qk_norm": False},
        written=_NO_DROPOUT,
        windows=Windows(_every_layer, 4096),
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _PHI3,
        {**without(_DECODER_FIELDS, "attention_bias"), "norm_eps": Field("rms_norm_eps", 1e-5)},
        {"qk_norm": False},
        written={**_NO_DROPOUT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": None},
        windows=Windows(_every_layer, by_layer=False),
        # "su" and "yarn" are the names of the kind in early files.
        rope_types=dict.fromkeys(("longrope", "su", "yarn"), "longrope"),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_DECODER, **_QK_NORM, **_EXPERTS},
        {**_DECODER_FIELDS, **_EXPERT_FIELDS},
        {"qk_norm": True},
        _ALL_LAYERS_HAVE_EXPERTS,
        _NO_DROPOUT,
        windows=Windows(_every_layer, 4096, "use_sliding_window", by_layer=False),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        {**_DECODER, **_MIXTRAL_EXPERTS},
        {
            **without(_DECODER_FIELDS, "attention_bias", "intermediate_size"),
            "norm_eps": Field("rms_norm_eps", 1e-5),
            "num_experts": Field("num_local_experts", 8),
            "num_experts_per_tok": Field("num_experts_per_tok", 2),
            "moe_intermediate_size": Field("intermediate_size"),
            "router_aux_loss_coef": Field("router_aux_loss_coef", 0.001),
        },
        {"qk_norm": False, "norm_topk_prob": True},
        written={**_NO_DROPOUT, "router_jitter_noise": 0.0},
        windows=Windows(_every_layer, by_layer=False),
        rope_theta=1e6,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**_DECODER, **_EXPERTS, **_QWEN_SHARED_EXPERT},
        {
            **without(_DECODER_FIELDS, "attention_bias"),
            **_EXPERT_FIELDS,
            **_same("shared_expert_intermediate_size"),
            "qkv_bias": Field("qkv_bias", True),
        },
        {"qk_norm": False},
        _ALL_LAYERS_HAVE_EXPERTS,
        _NO_DROPOUT,
        conditions=(
            (
                "shared_expert_intermediate_size = 0",
                lambda config: config.shared_expert_intermediate_size > 0,
            ),
        ),
        windows=Windows(_alternate_layers, 4096, "use_sliding_window", first_layer=True),
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        {**_DECODER, **_QK_NORM, **_EXPERTS, **_DOTS_SHARED_EXPERT},
        {
            **_DECODER_FIELDS,
            **without(_EXPERT_FIELDS, "router_aux_loss_coef"),
            "num_experts": Field("n_routed_experts"),
            "shared_expert_intermediate_size": Field(
                "n_shared_experts",
                0,
                read=lambda experts, source: experts * source["moe_intermediate_size"],
                write=lambda width, config: width // config.moe_intermediate_size,
            ),
        },
        {"qk_norm": True, "scoring_func": "sigmoid"},
        {
            "n_group": Constant(1, 1),
            "topk_group": Constant(1, 1),
            "routed_scaling_factor": Constant(1.0, 1.0),
            "first_k_dense_replace": Constant(0, 0),
        },
        _NO_DROPOUT,
        windows=Windows(_from_layer(62), 4096, first_layer=True),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA2,
        {
            **_GEMMA_FIELDS,
            "attn_logit_softcapping": _softcap("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": _softcap("final_logit_softcapping", 30.0),
        },
        {"qk_norm": False, "norm_position": "sandwich"},
        {"use_bidirectional_attention": Constant(False, False)},
        _NO_DROPOUT,
        conditions=(_DIVISIBLE_HIDDEN_SIZE, _WHOLE_SCALAR),
        windows=Windows(_all_but_every(2), 4096),
        norm_offset=1.0,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _OLMO2,
        _OLMO_FIELDS,
        {"norm_position": "output", "qk_norm_over": "projection"},
        written=_NO_DROPOUT,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        {
            "vocab_size": Field("vocab_size"),
            "hidden_size": Field("n_embd"),
            "num_hidden_layers": Field("n_layer"),
            "num_attention_heads": Field("n_head"),
            "num_key_value_heads": Field("n_head"),
            # llama.cpp's converter needs the old name n_ctx.
            "max_position_embeddings": Field("n_positions", copy="n_ctx"),
            "intermediate_size": Field("n_inner", lambda source: 4 * source["n_embd"]),
            "hidden_act": Field("activation_function", "gelu_new", read=_read_activation),
            "norm_eps": Field("layer_norm_epsilon", 1e-5),
            "tie_word_embeddings": Field("tie_word_embeddings", True),
            "initializer_range": Field("initializer_range", 0.02),
        },
        {
            "position_embedding": "learned",
            "gated_mlp": False,
            "norm": "layernorm",
            "norm_bias": True,
            "qk_norm": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {
            "scale_attn_weights": Constant(True, True),
            "scale_attn_by_inverse_layer_idx": Constant(False, False),
            "add_cross_attention": Constant(False, False),
        },
        {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
        transposed=True,
        prefix="transformer.",
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
)
FAMILIES = {family.model_type: family for family in _FAMILIES}


def family_of(config: ModelConfig) -> Family:
    """Return the family of `config.model_type`, or the first one that has the options of a configuration.

    Raises UsageError naming the options that the family, or the nearest one, lacks.
    """
    families = (FAMILIES[config.model_type],) if config.model_type else _FAMILIES
    lacking = [unsupported_options(config, family) for family in families]
    fewest = min(lacking, key=len)
    family = families[lacking.index(fewest)]
    if fewest:
        nearest = "" if config.model_type else "no equivalent Hugging Face architecture: the nearest, "
        raise UsageError(f"{nearest}{family.architecture}, does not support {'; '.join(fewest)}")
    return family
