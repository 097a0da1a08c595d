"""The fused attention sublayer with a manual backward (fused_sublayers.py, which explains the suffixes)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deskside.kernels import fused
from deskside.kernels.attention import AttentionContext
from deskside.kernels.attention.manual_backward import (
    SavedAttention,
    attention_backward,
    attention_forward,
    attention_output,
)
from deskside.kernels.fused import Fp8, QkvLayout
from deskside.ops.composite import AttentionSublayer
from deskside.precision.fused_sublayers import FusedSublayer, flatten_tokens
from deskside.precision.quantized_operand import QuantizedOperand

Rotation = tuple[Tensor, Tensor]


class FusedAttention(FusedSublayer):
    """Fused attention sublayer: (residual, delta) -> (residual, delta)."""

    sublayer: AttentionSublayer

    @cached_property
    def layout(self) -> QkvLayout:
        sublayer = self.sublayer
        eps = 0.0 if sublayer.q_norm is None else sublayer.q_norm.eps
        return QkvLayout(sublayer.heads, sublayer.kv_heads, sublayer.head_dim, eps)

    def __call__(
        self,
        residual_BTD: Tensor,
        delta_BTD: Tensor | None,
        rotation: Rotation | None,
        context: AttentionContext,
    ) -> tuple[Tensor, Tensor]:
        """rotation: cosines and sines of the rotary angles, (B or 1, T, 1, C / 2) each. context: already prepared."""
        angles = None if rotation is None else tuple(t.flatten(0, 2) for t in rotation)
        q_norm, k_norm = self.sublayer.q_norm, self.sublayer.k_norm
        residual_BTD, delta_BTD = _Attention.apply(
            self,
            (context, angles),
            residual_BTD,
            delta_BTD,
            self.norm.weight,
            self.first.linear.weight,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            self.second.linear.weight,
        )
        return residual_BTD, delta_BTD


@dataclass
class _AttentionState:
    """Values that attention's backward needs besides the residual."""

    qkv: Tensor  # output of the first layer
    attention: SavedAttention | None
    normed: tuple[Tensor, ...]  # saved input of the first layer
    o: tuple[Tensor, ...]  # saved input of the second layer


def _attention(
    plan: FusedAttention,
    context: AttentionContext,
    batch: int,
    angles: tuple[Tensor, Tensor] | None,
    normed: Tensor | Fp8,
    dtype: torch.dtype,
    save: bool,
) -> tuple[QuantizedOperand, _AttentionState]:
    """Compute attention from the norm's output up to the second layer's input. Returns this input and the saved state.

    A recomputation in the backward needs no more than this. Without `save`, the state of attention itself is None.
    """
    sublayer, layout = plan.sublayer, plan.layout
    rows, saved_normed = plan.first.x.quantize_rows(normed)
    qkv = plan.first.output(rows, dtype)
    del rows, normed
    q_weight = None if sublayer.q_norm is None else sublayer.q_norm.weight
    k_weight = None if sublayer.k_norm is None else sublayer.k_norm.weight
    q_NHC, k_NKC = fused.qk_norm_rope(qkv, q_weight, k_weight, angles, layout)
    q_BTHC, k_BTKC = (x.view(batch, -1, *x.shape[1:]) for x in (q_NHC, k_NKC))
    v_BTKC = qkv.view(batch, -1, sublayer.heads + 2 * sublayer.kv_heads, sublayer.head_dim)[
        :, :, -sublayer.kv_heads :
    ]
    saved_attention = None
    if save:
        o_BTHC, saved_attention = attention_forward(q_BTHC, k_BTKC, v_BTKC, context)
    else:
        o_BTHC = attention_output(q_BTHC, k_BTKC, v_BTKC, context)
    rows, saved_o = plan.second.x.quantize_rows(o_BTHC.reshape(qkv.shape[0], -1).contiguous())
    return rows, _AttentionState(qkv, saved_attention, saved_normed, saved_o)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: FusedAttention,
        context_and_angles: tuple[AttentionContext, tuple[Tensor, Tensor] | None],
        residual_BTD: Tensor,
        delta_BTD: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """weights: of the norm, the first layer, the norms of q and k, and the second layer, to get gradients."""
        shape, (context, angles) = residual_BTD.shape, context_and_angles
        norm_weight, _, q_weight, k_weight, _ = weights
        residual, normed, rstd = plan.add_norm(
            flatten_tokens(residual_BTD), None if delta_BTD is None else flatten_tokens(delta_BTD)
        )
        save = not plan.recompute
        rows, state = _attention(plan, context, shape[0], angles, normed, residual.dtype, save)
        delta = plan.second.output(rows, residual.dtype)
        ctx.plan, ctx.shape, ctx.state = plan, shape, None if plan.recompute else state
        ctx.context_and_angles = context_and_angles
        ctx.save_for_backward(residual, rstd, norm_weight, q_weight, k_weight)
        ctx.set_materialize_grads(False)
        return residual_BTD if delta_BTD is None else residual.view(shape), delta.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: FusedAttention = ctx.plan
        layout, (context, angles), batch = plan.layout, ctx.context_and_angles, ctx.shape[0]
        grad_residual, grad_delta = grads
        *saved, q_weight, k_weight = ctx.saved_tensors
        state, ctx.state = ctx.state, None
        if state is None:
            normed = plan.add_norm(saved[0], None)[1]
            state = _attention(plan, context, batch, angles, normed, saved[0].dtype, save=True)[1]
        assert grad_delta is not None and state.attention is not None
        grad_o, grad_second = plan.second_backward(grad_delta, state.o)
        grad_o_BTHC = grad_o.view(batch, -1, layout.heads, layout.head_dim)
        grad_q, grad_k, grad_v = (_flatten_heads(g) for g in attention_backward(state.attention, grad_o_BTHC))
        del grad_o, grad_o_BTHC
        grad_qkv, grad_q_weight, grad_k_weight = fused.qk_norm_rope_backward(
            (grad_q, grad_k, grad_v), state.qkv, q_weight, k_weight, angles, layout, plan.first.g.cast
        )
        del grad_q, grad_k, grad_v
        grad, grad_norm, grad_first = plan.first_backward(grad_qkv, state.normed, tuple(saved), grad_residual)
        grad = grad.view(ctx.shape)
        # residual + delta is the input, so both have the same gradient.
        grad_delta = grad if ctx.needs_input_grad[3] else None
        return None, None, grad, grad_delta, grad_norm, grad_first, grad_q_weight, grad_k_weight, grad_second


def _flatten_heads(x_BTHC: Tensor) -> Tensor:
    """Flatten (B, T, H, C) to (N, H, C), with contiguous channels and one stride between tokens."""
    B, T = x_BTHC.shape[:2]
    if x_BTHC.stride(-1) != 1 or (B > 1 and x_BTHC.stride(0) != T * x_BTHC.stride(1)):
        x_BTHC = x_BTHC.contiguous()
    return x_BTHC.flatten(0, 1)
