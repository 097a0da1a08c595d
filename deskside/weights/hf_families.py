"""Hugging Face architectures: the family of a ModelConfig, and the names of its tensors.

Export and import use one table of names per family. Its keys are logical names (ops/logical.py), so that it applies to
fused and separate projections. An export with an option that the family does not support is refused, because it would
load but compute something else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError

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


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    names: logical module name -> Hugging Face module name. fixed: options of ModelConfig for which the architecture has
    only one value. transposed: the matrices of the blocks are (in, out), as in GPT-2's Conv1D. prefix: prefix of tensor
    names that some checkpoints omit. buffers: suffixes of stored tensors that are not weights.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any]
    transposed: bool = False
    prefix: str = ""
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)


_DECODER_OPTIONS = {
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
        {**_DECODER_OPTIONS, "qk_norm": True, "mlp_bias": False},
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_DECODER, **_QK_NORM, **_EXPERTS},
        {**_DECODER_OPTIONS, "qk_norm": True, "mlp_bias": False},
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**_DECODER, **_EXPERTS, **_QWEN_SHARED_EXPERT},
        {**_DECODER_OPTIONS, "qk_norm": False, "mlp_bias": False, "attention_bias": False},
    ),
    "dots1": Family(
        "dots1",
        "Dots1ForCausalLM",
        {**_DECODER, **_QK_NORM, **_EXPERTS, **_DOTS_SHARED_EXPERT},
        {**_DECODER_OPTIONS, "qk_norm": True, "mlp_bias": False},
    ),
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        {**_DECODER, **_MLP},
        {**_DECODER_OPTIONS, "qk_norm": False, "sliding_window": None},
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
    """Return the architecture of a configuration. Raises UsageError naming options that the architecture lacks."""
    if config.position_embedding == "learned":
        family = FAMILIES["gpt2"]
    elif config.num_experts:
        softmax = "qwen2_moe" if config.shared_expert_intermediate_size else "qwen3_moe"
        family = FAMILIES["dots1" if config.scoring_func == "sigmoid" else softmax]
    else:
        family = FAMILIES["qwen3" if config.qk_norm else "llama"]
    unsupported = [
        f"{name} = {_as_written(getattr(config, name))} (only {_as_written(value)})"
        for name, value in family.fixed.items()
        if getattr(config, name) != value
    ]
    if family.model_type == "gpt2":
        if config.num_key_value_heads != config.num_attention_heads:
            unsupported.append("num_key_value_heads other than num_attention_heads")
        if config.num_attention_heads * config.head_dim != config.hidden_size:
            unsupported.append("num_attention_heads * head_dim other than hidden_size")
    if (
        family.model_type == "qwen3_moe"
        and config.window_pattern is not None
        and "L" in config.window_pattern
    ):
        unsupported.append("window_pattern with L (a window applies to all layers)")
    if unsupported:
        raise UsageError(
            f"no equivalent Hugging Face architecture: the nearest, {family.architecture}, does not support "
            f"{'; '.join(unsupported)}"
        )
    return family


def _as_written(value: object) -> str:
    """Return a value as it is written in a configuration file."""
    return "none" if value is None else str(value).lower()
