"""Names of tensors in Hugging Face checkpoints: logical module name (ops/logical.py) -> Hugging Face module name."""

MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DECODER = {
    "embed": "model.embed_tokens",
    "layers.{}.attn.norm": "model.layers.{}.input_layernorm",
    **{f"layers.{{}}.attn.{x}_proj": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
    "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
QK_NORM = {f"layers.{{}}.attn.{x}_norm": f"model.layers.{{}}.self_attn.{x}_norm" for x in "qk"}
MLP = {f"layers.{{}}.mlp.{name}": f"model.layers.{{}}.mlp.{name}" for name in MLP_PROJECTIONS}
OUTPUT_NORMS = {
    "layers.{}.attn.output_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.output_norm": "model.layers.{}.post_feedforward_layernorm",
}
GEMMA2 = {
    **DECODER,
    **MLP,
    **OUTPUT_NORMS,
    "layers.{}.mlp.norm": "model.layers.{}.pre_feedforward_layernorm",
}
OLMO2 = {
    **{name: value for name, value in DECODER.items() if not name.startswith("layers") or "proj" in name},
    **MLP,
    **QK_NORM,
    **OUTPUT_NORMS,
}
EXPERTS = {
    "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
    **{
        f"layers.{{}}.mlp.experts.{{}}.{x}": f"model.layers.{{}}.mlp.experts.{{}}.{x}"
        for x in MLP_PROJECTIONS
    },
}
DOTS_SHARED_EXPERT = {
    f"layers.{{}}.mlp.shared_expert.{x}": f"model.layers.{{}}.mlp.shared_experts.{x}" for x in MLP_PROJECTIONS
}
QWEN_SHARED_EXPERT = {
    **{
        f"layers.{{}}.mlp.shared_expert.{x}": f"model.layers.{{}}.mlp.shared_expert.{x}"
        for x in MLP_PROJECTIONS
    },
    "layers.{}.mlp.shared_expert.token_gate": "model.layers.{}.mlp.shared_expert_gate",
}
GPT2 = {
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

MIXTRAL_EXPERTS = {
    "layers.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
    **{
        f"layers.{{}}.mlp.experts.{{}}.{x}": f"model.layers.{{}}.block_sparse_moe.experts.{{}}.{w}"
        for x, w in zip(MLP_PROJECTIONS, ("w1", "w3", "w2"), strict=True)
    },
}
PHI3 = {
    **DECODER,
    **{f"layers.{{}}.attn.{x}_proj": "model.layers.{}.self_attn.qkv_proj" for x in "qkv"},
    **{f"layers.{{}}.mlp.{x}_proj": "model.layers.{}.mlp.gate_up_proj" for x in ("gate", "up")},
    "layers.{}.mlp.down_proj": "model.layers.{}.mlp.down_proj",
}
GEMMA3 = {**GEMMA2, **QK_NORM}
NEOX = {
    "embed": "gpt_neox.embed_in",
    "layers.{}.attn.norm": "gpt_neox.layers.{}.input_layernorm",
    **{f"layers.{{}}.attn.{x}_proj": "gpt_neox.layers.{}.attention.query_key_value" for x in "qkv"},
    "layers.{}.attn.o_proj": "gpt_neox.layers.{}.attention.dense",
    "layers.{}.mlp.norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.up_proj": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "layers.{}.mlp.down_proj": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
_GPT_OSS_EXPERTS = "model.layers.{}.mlp.experts."
GPT_OSS = {
    **DECODER,
    "layers.{}.attn.sinks": "model.layers.{}.self_attn.sinks",
    "layers.{}.mlp.router": "model.layers.{}.mlp.router",
    **{
        f"layers.{{}}.mlp.experts.{{}}.{x}_proj.{leaf}": f"{_GPT_OSS_EXPERTS}{stacked}_proj{suffix}"
        for x, stacked in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down"))
        for leaf, suffix in (("weight", ""), ("bias", "_bias"))
    },
}
