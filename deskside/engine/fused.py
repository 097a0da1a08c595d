"""Transformer blocks with fused kernels, for prefill and decoding.

With one new token per row, each kernel takes a few microseconds whatever it computes, so the time of a step is
proportional to its number of kernels. With up to `few_tokens.MAX_TOKENS` rows, each product of a block is one kernel
with the activation after it (kernels/few_tokens.py). With one row, the add and norm before it are in the same kernel,
and a block takes six: qkv; attention with QK-norm, RoPE and cache write; the sum of its spans; o; gate and up; down.
With more rows, add + norm is a kernel of its own twice, and with still more, the activation. Steps with several new
tokens per row, and prompts, have one more for QK-norm, RoPE and cache write. With experts, the second half takes six:
add + norm, router, routing, gathered product with activation, product, sum by token.

The results equal those of the model's own modules up to rounding. An attention or MLP that the kernels do not cover
runs in its own module.
"""

from typing import Any

from torch import Tensor
from torch.nn import Module

from deskside.config.dimensions import uncovered_reason
from deskside.kernels import few_tokens, fused, moe
from deskside.kernels.attention import PLAIN
from deskside.kernels.decode import attend_from_new, qk_norm_rope_into_cache
from deskside.kernels.fused import QkvLayout
from deskside.model.block import MLP, Attention, CachedBlocks, LayerCache, MoE
from deskside.model.transformer import Transformer
from deskside.ops.composite import AddNormLinear, RMSNorm
from deskside.ops.linear import Linear
from deskside.ops.moe import Experts


class FusedBlocks(CachedBlocks):
    """Usage: `model.forward_cached(..., blocks=FusedBlocks(model))`."""

    def __init__(self, model: Transformer):
        self._model = model

    def attention(
        self, attn: Attention, residual_BTD: Tensor, delta_BTD: Tensor, layer_cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        if covers_attention(attn):
            return self._attention(attn, residual_BTD, delta_BTD, layer_cache)
        return super().attention(attn, residual_BTD, delta_BTD, layer_cache)

    def mlp(self, mlp: MLP | MoE, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(mlp, MLP) and covers_mlp(mlp):
            return self._mlp(mlp, residual_BTD, delta_BTD)
        if isinstance(mlp, MoE) and covers_experts(mlp):
            return self._experts(mlp, residual_BTD, delta_BTD)
        return super().mlp(mlp, residual_BTD, delta_BTD)

    def final(self, operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> Tensor:
        """Return the hidden states after the final norm."""
        if isinstance(operator.norm, RMSNorm) and operator.position == "pre":
            return _add_norm(operator, residual_BTD, delta_BTD)[1].view_as(residual_BTD)
        return super().final(operator, residual_BTD, delta_BTD)

    def _attention(
        self, attn: Attention, residual_BTD: Tensor, delta_BTD: Tensor, layer_cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        B, T, _ = residual_BTD.shape
        residual_ND, qkv_NW = _add_norm_linear(attn.input, residual_BTD, delta_BTD)
        q_norm, k_norm = attn.q_norm, attn.k_norm
        norms = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        layout = QkvLayout(attn.heads, attn.kv_heads, attn.head_dim, 0.0 if q_norm is None else q_norm.eps)
        slots, angles = layer_cache.slots, self._model.rope_tables(attn.rope)
        context = attn.with_sinks(attn.context(PLAIN))
        if slots.single:
            o_BTHC = attend_from_new(
                qkv_NW, norms, angles, layout, layer_cache.keys_values,
                layer_cache.cache.table_BN, slots.position_BT[:, 0], layer_cache.cache.bound, context,
            )[:, None]  # fmt: skip
        else:
            where = (slots.position_BT.flatten(), slots.page_BT.flatten(), slots.offset_BT.flatten())
            q_BTHC = qk_norm_rope_into_cache(
                qkv_NW, norms, angles, layout, layer_cache.keys_values, where
            ).unflatten(0, (B, T))
            o_BTHC = layer_cache.attention(q_BTHC, context)
        return residual_ND.view_as(residual_BTD), attn.normed(_linear(attn.output, o_BTHC.flatten(2)))

    @staticmethod
    def _mlp(mlp: MLP, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        residual_ND, hidden_NF = _add_norm_linear(mlp.input, residual_BTD, delta_BTD, mlp.output.activation)
        output_BTD = _linear(mlp.output.projection, hidden_NF).view_as(residual_BTD)
        return residual_ND.view_as(residual_BTD), mlp.normed(output_BTD)

    @staticmethod
    def _experts(mlp: MoE, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        residual_ND, normed_ND = _add_norm(mlp.input, residual_BTD, delta_BTD)
        mixture = mlp.mixture
        experts = mixture.experts
        gate_up, down = (
            weight.to(normed_ND.dtype) for weight in (experts.gate_up_weight, experts.down_weight)
        )
        routing = moe.route(
            mixture.router(normed_ND),
            mixture.experts_per_token,
            mixture.normalise,
            sigmoid=mixture.sigmoid,
            bias_E=mixture.e_score_correction_bias,
        )
        gated = len(experts.slices["gate_up_weight"]) == 2
        hidden_SF = moe.gathered_gated(normed_ND, gate_up, routing, experts.activation, gated)
        out_SD = moe.grouped_matmul(hidden_SF, down, routing.ends_E, transpose=True)
        shared_ND = None if mixture.shared_expert is None else mixture.shared_expert(normed_ND)
        delta_ND = moe.combine(out_SD, routing.slots_Nk, shared_ND)
        return residual_ND.view_as(residual_BTD), mlp.normed(delta_ND.view_as(residual_BTD))


def covers_attention(attn: Attention) -> bool:
    """Return True if the fused kernels support this attention layer."""
    return _covers(
        attn.input,
        head_dim=attn.head_dim,
        qk_norm_over_projection=attn.qk_norm_over == "projection",
        partial_rotary=attn.partial_rotary,
    )


def covers_mlp(mlp: MLP) -> bool:
    """Return True if the fused kernels support this MLP."""
    return _covers(mlp.input, parallel=mlp.parallel, clamped_swiglu=mlp.output.activation == "clamped_swiglu")


def covers_experts(mlp: MoE) -> bool:
    """Return True if the fused kernels support this mixture: not if experts have adapters or are stored in codes."""
    plain = type(mlp.mixture.experts) is Experts
    bias = mlp.mixture.router.bias is not None
    clamped = mlp.mixture.experts.activation == "clamped_swiglu"
    return plain and _covers(mlp.input, num_projections=1, bias=bias, clamped_swiglu=clamped)


def experts_wait(model: Transformer, tokens: int) -> bool:
    """Return True if the products of experts may wait for the device in a step with up to this many tokens."""
    device, dtype = model.embed.weight.device, model.activation_dtype
    return any(
        moe.grouped_backend(device, dtype, shape, tokens * block.mlp.mixture.experts_per_token) == "loop"
        for block in model.layers
        if isinstance(block.mlp, MoE)
        for shape in block.mlp.mixture.experts.shapes.values()
    )


def _covers(operator: AddNormLinear, **options: Any) -> bool:
    options = {"num_projections": len(operator.projections), **options}
    norm_first = isinstance(operator.norm, RMSNorm) and operator.position == "pre"
    return uncovered_reason(rmsnorm_first=norm_first, **options) is None


def _add_norm_linear(
    operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum, and the activation of the operator's product: gated if its projection is gate and up."""
    (projection,) = operator.projections
    assert isinstance(projection, Linear) and isinstance(operator.norm, RMSNorm)
    gated = activation is not None and len(projection.slices) == 2
    x_ND = residual_BTD.flatten(0, 1)
    if _covers_few_tokens(projection, x_ND):
        norm = few_tokens.AddNorm(delta_BTD.flatten(0, 1), operator.norm.weight, operator.norm.eps)
        return few_tokens.add_norm_linear(x_ND, norm, projection.weight, projection.bias, activation, gated)
    residual_ND, normed_ND = _add_norm(operator, residual_BTD, delta_BTD)
    out_NF = projection(normed_ND)
    if activation is not None:
        activated = fused.gated(out_NF, activation, gated)
        assert isinstance(activated, Tensor)
        out_NF = activated
    return residual_ND, out_NF


def _linear(layer: Module, x: Tensor) -> Tensor:
    """Return layer(x); by the kernel for few tokens, if it takes the layer."""
    x_NK = x.flatten(0, -2)
    if isinstance(layer, Linear) and _covers_few_tokens(layer, x_NK):
        return few_tokens.linear(x_NK, layer.weight, layer.bias).unflatten(0, x.shape[:-1])
    out: Tensor = layer(x)
    return out


def _covers_few_tokens(layer: Linear, x_NK: Tensor) -> bool:
    """Return True if the kernel for few tokens takes this product: no adapter, no codes, no product of a recipe."""
    return (
        type(layer) is Linear and layer.forward_override is None and few_tokens.supports(x_NK, layer.weight)
    )


def _add_norm(operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(operator.norm, RMSNorm)
    norm = operator.norm
    residual_ND, normed_ND, _ = fused.add_norm(
        residual_BTD.flatten(0, 1), delta_BTD.flatten(0, 1), norm.weight, norm.eps
    )
    assert isinstance(normed_ND, Tensor)
    return residual_ND, normed_ND
