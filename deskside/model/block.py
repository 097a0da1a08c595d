"""A transformer block: attention and MLP, each (residual, delta) -> (residual, delta).

The residual stream between sublayers is a pair: `residual` is the sum so far, and `delta` is the output of the previous
sublayer, which is not added yet. The first operator of the next sublayer adds them, so that add and norm can be one
kernel. All blocks have the same signature and differ only in their attention window, so torch.compile compiles one
graph per window instead of one per layer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deskside.config.model import ModelConfig
from deskside.kernels.attention import PLAIN, AttentionContext
from deskside.kernels.decode import paged_attention
from deskside.kernels.functional import rotate
from deskside.kernels.prefill import packed_attention
from deskside.model.cache import CacheSlots, KVCache
from deskside.ops.composite import (
    AddNormLinear,
    AttentionSublayer,
    GatedLinear,
    LayerNorm,
    MLPSublayer,
    Norm,
    RMSNorm,
    attention,
    make_projections,
)
from deskside.ops.linear import Linear
from deskside.ops.moe import Experts, MixtureOfExperts, MoESublayer
from deskside.ops.shared_expert import SharedExpert

Rotation = tuple[Tensor, Tensor]  # cos and sin, each (B or 1, T, 1, C / 2)


class LayerCache(NamedTuple):
    """The cache of one layer while the tokens at `slots` are appended. `layer` is the layer's index.

    rotation_of: returns cos and sin of these tokens for an `Attention.rope`; None without RoPE. context: the attention
    context of a prefill from position 0, which need not read the cache; None for all other tokens.
    """

    cache: KVCache
    layer: int
    slots: CacheSlots
    rotation_of: Callable[[str | None], Rotation | None]
    context: AttentionContext | None

    @property
    def keys_values(self) -> tuple[Tensor, Tensor]:
        """The layer's pages of keys and of values, (pages, K, S, C) each."""
        return self.cache.k[self.layer], self.cache.v[self.layer]

    def attention(self, q_BTHC: Tensor, options: AttentionContext) -> Tensor:
        """Attend from these tokens to the cached tokens of their rows up to and including themselves.

        options: window, scale, softcap and sinks of the layer.
        """
        cache, position_BT = self.cache, self.slots.position_BT
        if cache.cu_seqlens is not None:
            return packed_attention(
                q_BTHC[0], *self.keys_values, cache.table_BN, cache.lengths_B, cache.cu_seqlens, options
            )[None]
        return paged_attention(q_BTHC, *self.keys_values, cache.table_BN, position_BT, cache.bound, options)


class Attention(AttentionSublayer):
    """Grouped-query attention with its norms and projections.

    window: attention window of this layer; None is full. scale, softcap: see `AttentionContext`. rope: which rotary
    angles it has (`ModelConfig.layer_rope`). partial_rotary: they rotate only some channels of a head.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(output_norm(config), config.residual_multiplier)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = config.layer_window(layer)
        self.rope = config.layer_rope(layer)
        self.partial_rotary = config.rotary_dim < config.head_dim
        self.scale, self.softcap = config.attention_multiplier, config.attn_logit_softcapping
        self.qk_norm_over = config.qk_norm_over
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.sinks = nn.Parameter(torch.empty(self.heads)) if config.attention_sinks else None
        outputs = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        bias = config.attention_bias or config.qkv_bias
        projections = make_projections(config.hidden_size, outputs, bias, config.fused_qkv)
        self.input = input_operator(config, projections)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            whole = config.qk_norm_over == "projection"
            self.q_norm = RMSNorm(q_size if whole else self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(kv_size if whole else self.head_dim, config.norm_eps)
        self.output = Linear(q_size, [("o_proj", config.hidden_size)], config.attention_bias)

    def forward(
        self, residual_BTD: Tensor, delta_BTD: Tensor, rotation: Rotation | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """(residual, delta) -> (residual, delta). context: prepared for this window. rotation: None without RoPE."""
        if self.forward_override is not None:
            residual_BTD, output_BTD = self.forward_override(residual_BTD, delta_BTD, rotation, context)
        else:
            residual_BTD, q_BTHC, k_BTKC, v_BTKC = self._project(residual_BTD, delta_BTD, rotation)
            output_BTD = self.output(attention(q_BTHC, k_BTKC, v_BTKC, self.with_sinks(context)).flatten(2))
        return residual_BTD, self.normed(output_BTD)

    def context(self, base: AttentionContext) -> AttentionContext:
        """Return `base` with the window, scale and softcap of this layer."""
        return replace(base.for_window(self.window), scale=self.scale, softcap=self.softcap)

    def forward_cached(
        self, residual_BTD: Tensor, delta_BTD: Tensor, layer_cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Like `forward`, but append the tokens' keys and values to the cache and attend to the cache."""
        rotation = layer_cache.rotation_of(self.rope)
        residual_BTD, q_BTHC, k_BTKC, v_BTKC = self._project(residual_BTD, delta_BTD, rotation)
        layer_cache.cache.write(layer_cache.layer, layer_cache.slots, k_BTKC, v_BTKC)
        if layer_cache.context is not None:
            o_BTHC = attention(q_BTHC, k_BTKC, v_BTKC, self.with_sinks(layer_cache.context))
        else:
            o_BTHC = layer_cache.attention(q_BTHC, self.with_sinks(self.context(PLAIN)))
        return residual_BTD, self.normed(self.output(o_BTHC.flatten(2)))

    def with_sinks(self, context: AttentionContext) -> AttentionContext:
        """Return `context` with the sinks of this layer."""
        return context if self.sinks is None else replace(context, sinks_H=self.sinks)

    def _project(
        self, residual_BTD: Tensor, delta_BTD: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        residual_BTD, (q, k, v) = self.input(residual_BTD, delta_BTD)
        q_norm, k_norm, whole = self.q_norm, self.k_norm, self.qk_norm_over == "projection"
        if q_norm is not None and k_norm is not None and whole:
            q, k = q_norm(q), k_norm(k)
        q_BTHC = q.unflatten(-1, (self.heads, self.head_dim))
        k_BTKC = k.unflatten(-1, (self.kv_heads, self.head_dim))
        v_BTKC = v.unflatten(-1, (self.kv_heads, self.head_dim))
        if q_norm is not None and k_norm is not None and not whole:
            q_BTHC, k_BTKC = q_norm(q_BTHC), k_norm(k_BTKC)
        if rotation is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, *rotation), rotate(k_BTKC, *rotation)
        return residual_BTD, q_BTHC, k_BTKC, v_BTKC


class MLP(MLPSublayer):
    """The dense MLP, with or without a gate, and its norms."""

    def __init__(self, config: ModelConfig):
        super().__init__(output_norm(config), config.residual_multiplier)
        self.parallel = config.parallel_residual
        names = ("gate_proj", "up_proj") if config.gated_mlp else ("up_proj",)
        outputs = [(name, config.intermediate_size) for name in names]
        projections = make_projections(config.hidden_size, outputs, config.mlp_bias, config.fused_gate_up)
        self.input = input_operator(config, projections)
        down = Linear(config.intermediate_size, [("down_proj", config.hidden_size)], config.mlp_bias)
        self.output = GatedLinear(config.hidden_act, down)

    def forward(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, delta) -> (residual, delta)."""
        if self.forward_override is not None:
            residual_BTD, output_BTD = self.forward_override(residual_BTD, delta_BTD)
        else:
            residual_BTD, inputs = self.input(residual_BTD, None if self.parallel else delta_BTD)
            output_BTD = self.output(*inputs)
        output_BTD = self.normed(output_BTD)
        return residual_BTD, delta_BTD + output_BTD if self.parallel else output_BTD


class MoE(MoESublayer):
    """The mixture of experts and its norms. The third output is the router's statistics (R,)."""

    def __init__(self, config: ModelConfig):
        super().__init__(output_norm(config), config.residual_multiplier)
        self.input = input_operator(config, nn.ModuleList())
        router = Linear(config.hidden_size, [("router", config.num_experts)], config.mlp_bias)
        experts = Experts(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            config.hidden_act,
            config.gated_mlp,
            config.mlp_bias,
        )
        self.mixture = MixtureOfExperts(
            router,
            experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            sigmoid=config.scoring_func == "sigmoid",
            shared_expert=_shared_expert(config),
        )

    def forward(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(residual, delta) -> (residual, delta, router statistics)."""
        if self.forward_override is not None:
            residual_BTD, output_BTD, statistics_R = self.forward_override(residual_BTD, delta_BTD)
        else:
            residual_BTD, normed_BTD = self.input.add_norm(residual_BTD, delta_BTD)
            output_BTD, statistics_R = self.mixture(normed_BTD)
        return residual_BTD, self.normed(output_BTD), statistics_R


def _shared_expert(config: ModelConfig) -> SharedExpert | None:
    if not config.shared_expert_intermediate_size:
        return None
    return SharedExpert(
        config.hidden_size,
        config.shared_expert_intermediate_size,
        config.hidden_act,
        config.gated_mlp,
        has_token_gate=config.scoring_func == "softmax",
    )


class Block(nn.Module):
    """Attention followed by the MLP or the mixture of experts."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MoE(config) if config.num_experts else MLP(config)

    def forward(
        self, residual_BTD: Tensor, delta_BTD: Tensor, rotation: Rotation | None, context: AttentionContext
    ) -> tuple[Tensor, ...]:
        """Return (residual, delta), and the router's statistics (R,) in a model with experts."""
        return self.mlp(*self.attn(residual_BTD, delta_BTD, rotation, context))


class CachedBlocks:
    """The forward of blocks and final norm with a cache. The inference engine has a subclass with fused kernels.

    Attributes:
        narrows: Whether the last MLP and the final norm leave out tokens whose logits are not needed.
    """

    narrows = True

    def attention(
        self, attn: Attention, residual_BTD: Tensor, delta_BTD: Tensor, layer_cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Return (residual, delta) of the appended tokens after this sublayer."""
        return attn.forward_cached(residual_BTD, delta_BTD, layer_cache)

    def mlp(self, mlp: MLP | MoE, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (residual, delta) after this sublayer."""
        residual_BTD, delta_BTD, *_ = mlp(residual_BTD, delta_BTD)
        return residual_BTD, delta_BTD

    def final(self, operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> Tensor:
        """Return the hidden states after the final norm."""
        return operator.add_norm(residual_BTD, delta_BTD)[1]


DEFAULT_BLOCKS = CachedBlocks()


def input_operator(config: ModelConfig, projections: nn.ModuleList) -> AddNormLinear:
    """Return the first operator of a sublayer, with its norm where the configuration puts it."""
    norm = None if config.norm_position == "output" else hidden_norm(config)
    return AddNormLinear(norm, projections, "post" if config.norm_position == "post" else "pre")


def output_norm(config: ModelConfig) -> Norm | None:
    """Return the norm of a sublayer's output, or None if the model has none."""
    return hidden_norm(config) if config.norm_position in ("output", "sandwich") else None


def hidden_norm(config: ModelConfig) -> Norm:
    """Return the configured norm over the residual stream."""
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps)
