"""The supported Hugging Face architectures as a table. A new family is one entry of `_FAMILIES`.

An entry says how config.json (hf_fields.py) and the names of the tensors (hf_names.py) correspond to ModelConfig and to
our logical names, for import and export alike. Logical names with the same Hugging Face name are stacked in one tensor,
in the order of the model (q, k, v; gate, up).
"""

from deskside.config.model import ModelConfig
from deskside.utils.errors import UsageError
from deskside.weights import hf_fields as fields
from deskside.weights import hf_names as names
from deskside.weights.hf_family import Constant, Family, Field, Windows, unsupported_options

# The first family that has all options of a ModelConfig is its default.
_FAMILIES = (
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {**names.DECODER, **names.QK_NORM, **names.MLP},
        {**fields.DECODER, **fields.key_value_heads(32), "head_dim": Field("head_dim", 128)},
        {"qk_norm": True},
        written=fields.NO_DROPOUT,
        windows=Windows(fields.from_layer(28), 4096, "use_sliding_window", first_layer=True),
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        {**names.DECODER, **names.MLP},
        {**fields.DECODER, "mlp_bias": Field("mlp_bias", False)},
        {"qk_norm": False},
        written=fields.NO_DROPOUT,
        conditions=(fields.DIVISIBLE_HIDDEN_SIZE,),
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {**names.DECODER, **names.MLP},
        {**fields.without(fields.DECODER, "attention_bias"), **fields.key_value_heads(32)},
        {"qk_norm": False, "qkv_bias": True},
        written=fields.NO_DROPOUT,
        windows=Windows(fields.from_layer(28), 4096, "use_sliding_window", first_layer=True),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        {**names.DECODER, **names.MLP},
        {**fields.without(fields.DECODER, "attention_bias"), **fields.key_value_heads(8)},
        {"qk_norm": False},
        written=fields.NO_DROPOUT,
        windows=Windows(fields.every_layer, 4096, by_layer=False),
    ),
    Family(
        "ministral",
        "MinistralForCausalLM",
        {**names.DECODER, **names.MLP},
        {**fields.without(fields.DECODER, "attention_bias"), **fields.key_value_heads(8)},
        {"qk_norm": False},
        written=fields.NO_DROPOUT,
        windows=Windows(fields.every_layer, 4096),
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        {**names.DECODER, **names.MLP},
        fields.SMOLLM3,
        {"qk_norm": False},
        written=fields.NO_DROPOUT | fields.NO_PADDING,
        windows=Windows(fields.layers_without_rope, switch="use_sliding_window"),
        rope_theta=2e6,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        {**names.DECODER, **names.MLP},
        fields.GRANITE,
        {"qk_norm": False},
        written=fields.NO_DROPOUT,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        names.PHI3,
        {
            **fields.without(fields.DECODER, "attention_bias", "head_dim"),
            "norm_eps": Field("rms_norm_eps", 1e-5),
        },
        {"qk_norm": False},
        written={**fields.NO_DROPOUT, **fields.NO_PADDING, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        windows=Windows(fields.every_layer, by_layer=False),
        partial_rotary=1.0,
        # "su" and "yarn" are the names of the kind in early files.
        rope_types=dict.fromkeys(("longrope", "su", "yarn"), "longrope"),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**names.DECODER, **names.QK_NORM, **names.EXPERTS},
        {**fields.DECODER, **fields.key_value_heads(4), **fields.EXPERTS},
        {"qk_norm": True},
        fields.ALL_LAYERS_HAVE_EXPERTS,
        fields.NO_DROPOUT,
        windows=Windows(fields.every_layer, 4096, "use_sliding_window", by_layer=False),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        {**names.DECODER, **names.MIXTRAL_EXPERTS},
        {
            **fields.without(fields.DECODER, "attention_bias", "intermediate_size"),
            **fields.key_value_heads(8),
            "norm_eps": Field("rms_norm_eps", 1e-5),
            "num_experts": Field("num_local_experts", 8),
            "num_experts_per_tok": Field("num_experts_per_tok", 2),
            "moe_intermediate_size": Field("intermediate_size"),
            "router_aux_loss_coef": Field("router_aux_loss_coef", 0.001),
        },
        {"qk_norm": False, "norm_topk_prob": True},
        written={**fields.NO_DROPOUT, "router_jitter_noise": 0.0},
        windows=Windows(fields.every_layer, by_layer=False),
        rope_theta=1e6,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**names.DECODER, **names.EXPERTS, **names.QWEN_SHARED_EXPERT},
        {
            **fields.without(fields.DECODER, "attention_bias"),
            **fields.key_value_heads(16),
            **fields.EXPERTS,
            **fields.same("shared_expert_intermediate_size"),
            "qkv_bias": Field("qkv_bias", True),
        },
        {"qk_norm": False},
        fields.ALL_LAYERS_HAVE_EXPERTS,
        fields.NO_DROPOUT,
        conditions=(
            (
                "shared_expert_intermediate_size = 0",
                lambda config: config.shared_expert_intermediate_size > 0,
            ),
        ),
        windows=Windows(fields.alternate_layers, 4096, "use_sliding_window", first_layer=True),
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        {**names.DECODER, **names.QK_NORM, **names.EXPERTS, **names.DOTS_SHARED_EXPERT},
        {
            **fields.DECODER,
            **fields.key_value_heads(32),
            **fields.without(fields.EXPERTS, "router_aux_loss_coef"),
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
        fields.NO_DROPOUT,
        windows=Windows(fields.from_layer(62), 4096, first_layer=True),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        names.GEMMA2,
        {
            **fields.GEMMA,
            "attn_logit_softcapping": fields.softcap("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": fields.softcap("final_logit_softcapping", 30.0),
        },
        {"qk_norm": False, "norm_position": "sandwich"},
        {"use_bidirectional_attention": Constant(False, False)},
        fields.NO_DROPOUT,
        conditions=(fields.DIVISIBLE_HIDDEN_SIZE, fields.WHOLE_SCALAR, fields.SCALED_EMBEDDINGS),
        windows=Windows(fields.all_but_every(2), 4096),
        norm_offset=1.0,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        names.OLMO2,
        fields.OLMO,
        {"norm_position": "output", "qk_norm_over": "projection"},
        written=fields.NO_DROPOUT,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        names.GEMMA3,
        {
            **fields.GEMMA,
            # The text_config of models with images leaves out transformers' own defaults.
            "vocab_size": Field("vocab_size", 262208),
            "num_attention_heads": Field("num_attention_heads", 8),
            "max_position_embeddings": Field("max_position_embeddings", 131072),
            "final_logit_softcapping": Field("final_logit_softcapping", None),
        },
        {"norm_position": "sandwich"},
        # transformers does not cap the scores, whatever attn_logit_softcapping is.
        {
            "use_bidirectional_attention": Constant(False, False),
            "attn_logit_softcapping": Constant(None, None),
        },
        fields.NO_DROPOUT,
        conditions=(fields.DIVISIBLE_HIDDEN_SIZE, fields.WHOLE_SCALAR, fields.SCALED_EMBEDDINGS),
        windows=Windows(fields.all_but_every(6, "sliding_window_pattern"), 4096),
        rope_theta=1e6,
        local_rope=("rope_local_base_freq", 1e4),
        norm_offset=1.0,
        multimodal="gemma3",
    ),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        names.OLMO2,
        fields.OLMO,
        {"norm_position": "output", "qk_norm_over": "projection"},
        written=fields.NO_DROPOUT,
        windows=Windows(fields.all_but_every(4), 4096),
        rope_theta=5e5,
        local_rope=("rope_theta", 5e5),
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        names.NEOX,
        fields.NEOX,
        {"gated_mlp": False, "norm": "layernorm", "norm_bias": True, "qk_norm": False, "mlp_bias": True},
        written={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        rope_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        partial_rotary=0.25,
        prefix="gpt_neox.",
        buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
        stacked_by_head=True,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        names.GPT_OSS,
        fields.GPT_OSS,
        {
            "qk_norm": False,
            "attention_sinks": True,
            "mlp_bias": True,
            "norm_topk_prob": True,
            "hidden_act": "clamped_swiglu",
        },
        {
            "hidden_act": Constant("silu", "silu"),
            "swiglu_alpha": Constant(1.702, 1.702),
            "swiglu_limit": Constant(7.0, 7.0),
        },
        fields.NO_DROPOUT,
        windows=Windows(fields.all_but_every(2), 128),
        rope_theta=1.5e5,
        rope_scaling=fields.GPT_OSS_ROPE,
        stacked_experts=True,
        quantization="mxfp4",
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        names.GPT2,
        {
            "vocab_size": Field("vocab_size"),
            "hidden_size": Field("n_embd"),
            "num_hidden_layers": Field("n_layer"),
            "num_attention_heads": Field("n_head"),
            "num_key_value_heads": Field("n_head"),
            # llama.cpp's converter needs the old name n_ctx.
            "max_position_embeddings": Field("n_positions", copy="n_ctx"),
            "intermediate_size": Field("n_inner", lambda source: 4 * source["n_embd"]),
            "hidden_act": Field("activation_function", "gelu_new", read=fields.read_activation),
            "norm_eps": Field("layer_norm_epsilon", 1e-5),
            "tie_word_embeddings": Field("tie_word_embeddings", True),
            "initializer_range": fields.NEW_EMBEDDINGS,
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
        named = f"no equivalent Hugging Face architecture: the nearest, {family.architecture},"
        named = family.architecture if config.model_type else named
        raise UsageError(f"{named} does not support {'; '.join(fewest)}")
    return family
