"""Hugging Face architectures: the family of a ModelConfig, its config.json, and the names of its tensors.

One table of names per family serves export and import. It uses logical names (ops/logical.py), so fused and
separate projections share it. An option that no family supports is refused by name, because an export that loads
but computes something else is worse than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError

_DECODER = {
    "embed": "model.embed_tokens",
    "layers.{}.attn.norm": "model.layers.{}.input_layernorm",
    "layers.{}.attn.q_proj": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attn.k_proj": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attn.v_proj": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attn.o_proj": "model.layers.{}.self_attn.o_proj",
    "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
_QK_NORM = {
    "layers.{}.attn.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attn.k_norm": "model.layers.{}.self_attn.k_norm",
}
_MLP = {
    f"layers.{{}}.mlp.{name}": f"model.layers.{{}}.mlp.{name}"
    for name in ("gate_proj", "up_proj", "down_proj")
}
_EXPERTS = {
    "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
    **{
        f"layers.{{}}.mlp.experts.{{}}.{name}": f"model.layers.{{}}.mlp.experts.{{}}.{name}"
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}
_GPT2 = {
    "embed": "transformer.wte",
    "position": "transformer.wpe",
    "layers.{}.attn.norm": "transformer.h.{}.ln_1",
    "layers.{}.attn.q_proj": "transformer.h.{}.attn.c_attn",  # three of ours are stacked in this order
    "layers.{}.attn.k_proj": "transformer.h.{}.attn.c_attn",
    "layers.{}.attn.v_proj": "transformer.h.{}.attn.c_attn",
    "layers.{}.attn.o_proj": "transformer.h.{}.attn.c_proj",
    "layers.{}.mlp.norm": "transformer.h.{}.ln_2",
    "layers.{}.mlp.up_proj": "transformer.h.{}.mlp.c_fc",
    "layers.{}.mlp.down_proj": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    fixed: options for which it has only one value. names: logical module -> module name. transposed: block matrices
    are stored as (in, out), as in GPT-2's Conv1D. prefix: missing in some checkpoints.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any]
    transposed: bool = False
    prefix: str = ""
    buffers: tuple[str, ...] = field(
        default=("rotary_emb.inv_freq",)
    )  # stored by some checkpoints, not weights


_ROPE_DECODER = {
    "position_embedding": "rope",
    "gated_mlp": True,
    "norm": "rmsnorm",
    "norm_position": "pre",
    "final_logit_softcapping": None,
}

FAMILIES = {
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {**_DECODER, **_QK_NORM, **_MLP},
        {**_ROPE_DECODER, "qk_norm": True, "mlp_bias": False},
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_DECODER, **_QK_NORM, **_EXPERTS},
        {**_ROPE_DECODER, "qk_norm": True, "mlp_bias": False},
    ),
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        {**_DECODER, **_MLP},
        {**_ROPE_DECODER, "qk_norm": False, "sliding_window": None},
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        {
            "position_embedding": "learned",
            "gated_mlp": False,
            "norm": "layernorm",
            "norm_bias": True,
            "norm_position": "pre",
            "qk_norm": False,
            "attention_bias": True,
            "mlp_bias": True,
            "final_logit_softcapping": None,
            "sliding_window": None,
            "num_experts": 0,
        },
        transposed=True,
        prefix="transformer.",
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
}


def family_of(config: ModelConfig) -> Family:
    """Return the architecture of a configuration. Raises UsageError naming options without a Hugging Face form."""
    if config.position_embedding == "learned":
        family = FAMILIES["gpt2"]
    elif config.num_experts:
        family = FAMILIES["qwen3_moe"]
    else:
        family = FAMILIES["qwen3" if config.qk_norm else "llama"]
    wrong = [
        f"{name} = {_plain(getattr(config, name))} (it has {_plain(value)} only)"
        for name, value in family.fixed.items()
        if getattr(config, name) != value
    ]
    if family.model_type == "gpt2":
        if config.num_key_value_heads != config.num_attention_heads:
            wrong.append("num_key_value_heads other than num_attention_heads")
        if config.num_attention_heads * config.head_dim != config.hidden_size:
            wrong.append("num_attention_heads * head_dim other than hidden_size")
    if (
        family.model_type == "qwen3_moe"
        and config.window_pattern is not None
        and "L" in config.window_pattern
    ):
        wrong.append("window_pattern with L (one window for all layers only)")
    if wrong:
        raise UsageError(
            f"no Hugging Face form: {'; '.join(wrong)}; {family.architecture} is the nearest architecture"
        )
    return family


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a configuration, without tokenizer and dtype fields."""
    family = family_of(config)
    hidden, heads = config.hidden_size, config.num_attention_heads
    if family.model_type == "llama" and hidden % heads:
        raise UsageError(
            f"no Hugging Face form: transformers loads no Llama whose hidden_size ({hidden}) is not a multiple of "
            f"num_attention_heads ({heads}), whatever its head_dim; change one of them, or use qk_norm true (Qwen3)"
        )
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "use_cache": True,
    }
    if family.model_type == "gpt2":
        return result | {
            "n_embd": config.hidden_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "n_inner": config.intermediate_size,
            "n_positions": config.max_position_embeddings,
            "n_ctx": config.max_position_embeddings,  # the older name, which llama.cpp's converter needs
            "activation_function": config.hidden_act,
            "layer_norm_epsilon": config.norm_eps,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    result |= {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,  # for transformers before version 5
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    if family.model_type == "llama":
        return result | {"mlp_bias": config.mlp_bias}
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    result |= {
        "use_sliding_window": any(windows),
        "sliding_window": config.sliding_window if any(windows) else None,
    }
    if family.model_type == "qwen3_moe":
        return result | {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": config.norm_topk_prob,
            "router_aux_loss_coef": config.router_aux_loss_coef,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return result | {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "max_window_layers": windows.index(config.sliding_window)
        if any(windows)
        else config.num_hidden_layers,
    }


def _plain(value: object) -> str:
    return "none" if value is None else str(value).lower()
