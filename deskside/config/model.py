"""Architecture of a model, with Hugging Face's field names.

The default is exactly Qwen3's architecture (pre-RMSNorm, RoPE, grouped-query attention, QK-norm, SwiGLU, no bias);
with `num_experts` it is exactly Qwen3-MoE's. The other options are for studies and for models of other families.
"""

from typing import Literal

from pydantic import Field, PositiveFloat, TypeAdapter, ValidationError, model_validator

from deskside.config.base import Part
from deskside.config.rope import RopeScaling, Size

_SIZE_ADAPTER = TypeAdapter(Size)

# Hugging Face's names of the families in weights/hf_families.py.
ModelType = Literal[
    "qwen3",
    "llama",
    "qwen2",
    "mistral",
    "ministral",
    "smollm3",
    "granite",
    "phi3",
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "dots1",
    "gemma2",
    "olmo2",
    "gemma3_text",
    "olmo3",
    "gpt_neox",
    "gpt_oss",
    "gpt2",
]


INITIALIZER_RANGE = 0.02  # of GPT-2 and most models since


class ModelConfig(Part):
    """Architecture of a decoder-only transformer. Raises pydantic.ValidationError for contradictory options."""

    model_type: ModelType | None = Field(
        None,
        description="architecture of exports; default: the first of the choices that has the other options",
    )
    vocab_size: Size = Field(32768, description="entries of the embedding table")
    hidden_size: Size = Field(768, description="width of the residual stream")
    num_hidden_layers: int = Field(12, gt=0, le=10_000, description="number of blocks")
    num_attention_heads: Size = Field(12, description="query heads")
    num_key_value_heads: Size = Field(
        3, description="key-value heads; as many as query heads is MHA, 1 is MQA"
    )
    head_dim: Size = Field(64, description="channels per head; default: hidden_size / num_attention_heads")
    intermediate_size: Size = Field(2048, description="width of the MLP")
    max_position_embeddings: Size = Field(2048, description="longest sequence")

    position_embedding: Literal["rope", "learned"] = Field(
        "rope", description="rotary, or a learned table added to the embeddings"
    )
    rope_theta: PositiveFloat = Field(10000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of a head's channels that are rotated, the first ones (Phi-4-mini)",
    )
    rope_pattern: str | None = Field(
        None,
        description="R (rotary) or N (no position) for each layer, repeated, such as RRRN (SmolLM3); default: all R",
    )
    rope_local_base_freq: PositiveFloat | None = Field(
        None,
        description="base of the rotary frequencies of window layers, which rope_scaling then does not change "
        "(Gemma 3, OLMo 3); default: as in the other layers",
    )

    hidden_act: Literal["silu", "gelu", "gelu_new", "relu2", "clamped_swiglu"] = Field(
        "silu",
        description="gelu_new is GPT-2's tanh form; relu2 is ReLU squared; clamped_swiglu is gpt-oss's product of gate "
        "and up",
    )
    gated_mlp: bool = Field(True, description="true: act(gate) * up (SwiGLU with silu); false: act(up)")
    mlp_bias: bool = Field(
        False, description="bias in the MLP projections; of a mixture, in the experts and the router"
    )
    attention_bias: bool = Field(False, description="bias in the q, k, v and o projections")
    qkv_bias: bool = Field(False, description="bias in the q, k and v projections, but not in o (Qwen2)")

    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="normalization")
    norm_eps: PositiveFloat = Field(1e-6, description="added to the mean square or variance")
    norm_bias: bool = Field(False, description="bias of LayerNorm")
    norm_position: Literal["pre", "post", "output", "sandwich"] = Field(
        "pre",
        description="pre: before each sublayer; post: after its residual addition; output: of a sublayer's output, "
        "before the addition (OLMo 2); sandwich: pre and output (Gemma 2)",
    )
    parallel_residual: bool = Field(
        False, description="the MLP reads the same residual as attention, not attention's sum (GPT-NeoX)"
    )
    qk_norm: bool = Field(True, description="RMSNorm of queries and keys, before RoPE")
    qk_norm_over: Literal["head", "projection"] = Field(
        "head", description="channels of one RMSNorm of queries and keys: one head, or all heads (OLMo 2)"
    )
    q_norm_init: PositiveFloat = Field(
        1.0,
        description="initial weight of the RMSNorm of queries; 4 makes attention sharper from the first step (QK gain, "
        "parameter-golf PR 1955)",
    )
    attention_multiplier: PositiveFloat | None = Field(
        None, description="factor of the attention scores; default: 1 / sqrt(head_dim)"
    )
    attn_logit_softcapping: PositiveFloat | None = Field(
        None, description="attention scores become cap * tanh(scores / cap)"
    )
    attention_sinks: bool = Field(
        False, description="a learned score per head takes part in the softmax (gpt-oss)"
    )
    residual_multiplier: PositiveFloat = Field(
        1.0, description="factor of the output of every sublayer (Granite)"
    )
    logits_scaling: PositiveFloat = Field(1.0, description="divisor of the logits (Granite)")
    embedding_multiplier: PositiveFloat = Field(
        1.0, description="factor of the token embeddings; Gemma's is sqrt(hidden_size)"
    )

    tie_word_embeddings: bool = Field(False, description="the output head shares the embedding's weight")
    sliding_window: Size | None = Field(
        None, description="tokens that a query sees in a window layer, itself included"
    )
    window_pattern: str | None = Field(
        None, description="S (window) or L (full) for each layer, repeated, such as SSSL"
    )
    final_logit_softcapping: PositiveFloat | None = Field(
        None, description="logits become cap * tanh(logits / cap)"
    )

    fused_qkv: bool = Field(True, description="one weight for q, k and v")
    fused_gate_up: bool = Field(True, description="one weight for gate and up")
    initializer_range: PositiveFloat | None = Field(
        None,
        description="standard deviation of new embeddings; default: about half that of the blocks' first updates, "
        "or 0.02 if that is less or if embeddings are the head too or have no learning rate of their own",
    )

    num_experts: int = Field(0, ge=0, le=1 << 16, description="experts per MoE layer; 0 is a dense model")
    num_experts_per_tok: Size = Field(8, description="experts that each token uses")
    moe_intermediate_size: Size = Field(768, description="width of one expert")
    shared_expert_intermediate_size: int = Field(
        0,
        ge=0,
        le=1 << 27,
        description="width of an MLP beside the experts that every token uses; 0 is none. With softmax it has a gate "
        "(Qwen2-MoE, which has no qk_norm)",
    )
    norm_topk_prob: bool = Field(True, description="the chosen experts' weights sum to one")
    scoring_func: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="the router's scores: softmax (Qwen3-MoE), or sigmoid with a bias (dots.llm1)"
    )
    # With 0.001, the default of transformers, the routers of our runs on GPUs were uneven or collapsed; with 0.01, as
    # in Switch Transformer, they were not (docs/experts.md).
    router_aux_loss_coef: float = Field(0.01, ge=0, description="weight of the load-balancing loss")
    router_z_loss_coef: float = Field(
        0.0,
        ge=0,
        description="weight of log(sum(exp(router logits)))^2, which keeps the router's logits small",
    )
    router_bias_update_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="step of the biases that balance the experts without a loss; 0.001 is usual; needs sigmoid",
    )

    @model_validator(mode="before")
    @classmethod
    def _derive_head_dim(cls, data: object) -> object:
        """Set an omitted head_dim to hidden_size / num_attention_heads, as in Hugging Face's configs."""
        if not isinstance(data, dict) or data.get("head_dim") is not None:
            return data
        data = {key: value for key, value in data.items() if key != "head_dim"}
        defaults = cls.model_fields
        try:
            hidden = _SIZE_ADAPTER.validate_python(data.get("hidden_size", defaults["hidden_size"].default))
            heads = _SIZE_ADAPTER.validate_python(
                data.get("num_attention_heads", defaults["num_attention_heads"].default)
            )
        except ValidationError:
            return data  # the validation of the fields reports the error
        if hidden % heads:
            raise ValueError(
                f"hidden_size: {hidden} is not divisible by {heads} heads; change one of them, or set head_dim"
            )
        return {**data, "head_dim": hidden // heads}

    @model_validator(mode="after")
    def _check_combinations(self) -> "ModelConfig":
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        if heads % kv:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"num_key_value_heads: {heads} heads cannot be shared evenly by {kv} key-value heads; "
                f"use one of {divisors}"
            )
        if self.qkv_bias and self.attention_bias:
            raise ValueError("qkv_bias: attention_bias is true, which includes these; remove one of them")
        self._check_rope()
        if self.rope_local_base_freq is not None and self.window_pattern is None:
            raise ValueError(
                "rope_local_base_freq: only window layers read it, and the model has none; remove it, or set "
                "window_pattern and sliding_window"
            )
        if self.parallel_residual and self.norm_position == "post":
            raise ValueError(
                "parallel_residual: with norm_position post, attention changes the residual that the MLP reads; use pre"
            )
        if self.hidden_act == "clamped_swiglu" and not self.gated_mlp:
            raise ValueError("hidden_act: clamped_swiglu multiplies gate and up; use gated_mlp true")
        if self.qk_norm_over == "projection" and not self.qk_norm:
            raise ValueError("qk_norm_over: has no effect without qk_norm; set qk_norm true, or remove it")
        if self.q_norm_init != 1 and not self.qk_norm:
            raise ValueError("q_norm_init: has no effect without qk_norm; set qk_norm true, or remove it")
        if (self.sliding_window is None) != (self.window_pattern is None):
            given, missing = (
                ("sliding_window", "window_pattern")
                if self.sliding_window
                else ("window_pattern", "sliding_window")
            )
            raise ValueError(
                f"{given}: has no effect without {missing}; set both (window_pattern SSSL, sliding_window 512)"
            )
        if self.window_pattern == "":
            raise ValueError("window_pattern: must not be empty; write one letter per layer, such as SSSL")
        if self.window_pattern is not None and set(self.window_pattern) - {"S", "L"}:
            raise ValueError(
                f"window_pattern: '{self.window_pattern}' may contain only S (window) and L (full), such as SSSL"
            )
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            default = "" if "num_experts_per_tok" in self.model_fields_set else ", the default,"
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok}{default} exceeds num_experts = {self.num_experts}; "
                f"set it to {max(1, self.num_experts // 4)}, for example"
            )
        self._check_router()
        return self

    def _check_rope(self) -> None:
        """Raise ValueError for rotary options that contradict others."""
        for name in ("rope_scaling", "rope_pattern", "rope_local_base_freq", "partial_rotary_factor"):
            given = getattr(self, name) != ModelConfig.model_fields[name].default
            if given and self.position_embedding == "learned":
                raise ValueError(
                    f"{name}: learned positions have no frequencies; remove it, or use position_embedding rope"
                )
        if self.position_embedding == "learned":
            return
        if self.rope_pattern is not None and set(self.rope_pattern) not in ({"R", "N"}, {"N"}):
            raise ValueError(
                f"rope_pattern: '{self.rope_pattern}' must contain N (no position) and may contain R (rotary), and "
                "nothing else, such as RRRN"
            )
        if self.rotary_dim == 0 or self.rotary_dim % 2:
            key = "head_dim" if self.partial_rotary_factor == 1 else "partial_rotary_factor"
            raise ValueError(
                f"{key}: RoPE rotates pairs of channels, so their number must be even, not {self.rotary_dim}"
            )
        scaling = self.rope_scaling
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name, None)
            if factors is not None and len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"rope_scaling: {name} has {len(factors)} values for {self.rotary_dim // 2} pairs of channels"
                )

    def all_experts_warning(self) -> str:
        """Return what is unusual about a mixture whose tokens use every expert; "" for other models."""
        if self.num_experts < 2 or self.num_experts_per_tok < self.num_experts:
            return ""
        return (
            f"every token uses all {self.num_experts} experts, as much computation as one MLP of their total width; "
            "fewer per token are faster: --model.num_experts_per_tok"
        )

    def _check_router(self) -> None:
        """Raise ValueError for routers and shared experts that no Hugging Face architecture has."""
        if not self.num_experts:
            return
        if self.parallel_residual:
            raise ValueError("parallel_residual: no mixture of experts has it; use false, or num_experts 0")
        shared, width = self.shared_expert_intermediate_size, self.moe_intermediate_size
        if self.mlp_bias and (shared or self.scoring_func == "sigmoid"):
            raise ValueError(
                "mlp_bias: only a softmax router without a shared expert has experts with biases (gpt-oss); use false"
            )
        if self.scoring_func == "sigmoid" and not self.qk_norm:
            raise ValueError(
                "scoring_func: dots.llm1, which has a sigmoid router, has QK-norm; use qk_norm true, or softmax"
            )
        if self.scoring_func == "softmax" and shared and self.qk_norm:
            raise ValueError(
                "shared_expert_intermediate_size: Qwen2-MoE, which has a softmax router and a shared expert, has no "
                "QK-norm; use qk_norm false, or scoring_func sigmoid"
            )
        if self.scoring_func == "sigmoid" and shared % width:
            raise ValueError(
                f"shared_expert_intermediate_size: with a sigmoid router, it is a multiple of moe_intermediate_size = "
                f"{width}, not {shared}"
            )
        if self.num_experts == 1 and self.scoring_func == "sigmoid":
            raise ValueError("scoring_func: a sigmoid router chooses among at least two experts; use softmax")

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    def layer_rope(self, layer: int) -> Literal["main", "local"] | None:
        """Return which rotary angles block `layer` has: "local" are those of rope_local_base_freq; None is none."""
        pattern = self.rope_pattern
        if self.position_embedding == "learned" or (pattern and pattern[layer % len(pattern)] == "N"):
            return None
        return "main" if self.rope_local_base_freq is None or self.layer_window(layer) is None else "local"

    def layer_window(self, layer: int) -> int | None:
        """Return the attention window of block `layer` in tokens, None for full attention."""
        if self.window_pattern is None or self.window_pattern[layer % len(self.window_pattern)] == "L":
            return None
        return self.sliding_window
