"""Fused attention and MLP sublayers with a manual backward, and products in their recipe's formats.

Autograd passes a gradient from node to node in the dtype of the activation. A gradient that its kernel writes in FP8,
row-wise and transposed, cannot be passed that way. So one autograd node covers a whole sublayer, from (residual, delta)
to (residual, delta), and inside of it every tensor has the form that the next product reads:

    forward    add + norm (+ cast) -> product -> QK-norm + RoPE, attention -> product
               add + norm (+ cast) -> product -> activation * gate (+ cast) -> product
    backward   the same steps in reverse order

BF16 runs the same code without the casts. Activation checkpointing is part of the node: with `recompute` it saves only
the residual, which the next sublayer saves anyway, and the backward recomputes the rest from it. The saved state is
freed by the first backward, so a second backward through the same graph is not possible.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deskside.kernels import fused
from deskside.kernels.attention import AttentionContext
from deskside.kernels.attention.manual_backward import SavedAttention, attention_backward, attention_forward
from deskside.kernels.fused import Fp8, QkvLayout
from deskside.ops.composite import AttentionSublayer, MLPSublayer, RMSNorm
from deskside.precision.quantized_linear import QuantizedLinear
from deskside.precision.quantized_operand import QuantizedOperand

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FusedSublayer:
    """A sublayer with its two quantized layers. With `recompute`, the backward recomputes all but the residual."""

    sublayer: Any
    first: QuantizedLinear
    second: QuantizedLinear
    recompute: bool = False

    @cached_property
    def norm(self) -> RMSNorm:
        return rms_norm(self.sublayer.input.norm)

    def add_norm(self, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | Fp8, Tensor]:
        """Return residual + delta, its norm as the first layer reads it, and the norm's 1 / RMS."""
        return fused.add_norm(residual, delta, self.norm.weight, self.norm.eps, self.first.x.cast)

    def second_backward(
        self, grad_delta_BTD: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Through the second layer: (gradient of its input, of its weight)."""
        plan = self.second
        rows, kept_grad = plan.g.split(_flat(grad_delta_BTD))
        grad = plan.input_gradient(rows, grad_delta_BTD.dtype)
        return grad, plan.weight_gradient(plan.g.columns_of(kept_grad), plan.x.columns_of(kept))

    def first_backward(
        self,
        grad_inner: Tensor | Fp8,
        kept: tuple[Tensor, ...],
        saved: tuple[Tensor, Tensor, Tensor],
        grad_residual_BTD: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Through the first layer and the norm: (gradient of residual and delta, of the norm's weight, of the weight).

        saved: the residual, the norm's 1 / RMS and its weight.
        """
        plan, (residual, rstd, norm_weight) = self.first, saved
        rows, kept_grad = plan.g.split(grad_inner)
        grad_normed = plan.input_gradient(rows, residual.dtype)
        grad_weight = plan.weight_gradient(plan.g.columns_of(kept_grad), plan.x.columns_of(kept))
        grad_residual = None if grad_residual_BTD is None else _flat(grad_residual_BTD)
        grad, grad_norm = fused.add_norm_backward(grad_normed, residual, rstd, norm_weight, grad_residual)
        return grad, grad_norm.to(norm_weight.dtype), grad_weight


class FusedMLP(FusedSublayer):
    """Fused MLP sublayer."""

    sublayer: MLPSublayer

    @cached_property
    def gate(self) -> bool:
        return len(self.first.linear.slices) == 2

    def __call__(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, delta) -> (residual, delta)."""
        weights = (self.norm.weight, self.first.linear.weight, self.second.linear.weight)
        residual_BTD, delta_BTD = _MLP.apply(self, residual_BTD, delta_BTD, *weights)
        return residual_BTD, delta_BTD


class FusedAttention(FusedSublayer):
    """Fused attention sublayer."""

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
        """(residual, delta) -> (residual, delta). `context` is prepared; rotation: (B or 1, T, 1, C / 2) each."""
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
class _MLPState:
    """State of the MLP's backward besides the residual: the first product's output, and the inputs of both layers."""

    inner: Tensor
    normed: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]


def _mlp(plan: FusedMLP, normed: Tensor | Fp8, dtype: torch.dtype) -> tuple[QuantizedOperand, _MLPState]:
    """Return the second layer's input, which is as far as a recomputation has to go, and the state."""
    rows, kept_normed = plan.first.x.split(normed)
    inner = plan.first.output(rows, dtype)
    del rows, normed
    hidden = fused.gated(inner, plan.sublayer.output.activation, plan.gate, plan.second.x.cast)
    rows, kept_hidden = plan.second.x.split(hidden)
    return rows, _MLPState(inner, kept_normed, kept_hidden)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: FusedMLP, residual_BTD: Tensor, delta_BTD: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """weights: the norm's, the first and the second layer's, which `plan` knows; they are here for autograd."""
        shape = residual_BTD.shape
        residual, normed, rstd = plan.add_norm(_flat(residual_BTD), _flat(delta_BTD))
        rows, state = _mlp(plan, normed, residual.dtype)
        delta = plan.second.output(rows, residual.dtype)
        ctx.plan, ctx.shape, ctx.state = plan, shape, None if plan.recompute else state
        ctx.save_for_backward(residual, rstd, weights[0])
        ctx.set_materialize_grads(False)
        return residual.view(shape), delta.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: FusedMLP = ctx.plan
        grad_residual, grad_delta = grads
        saved = ctx.saved_tensors
        state, ctx.state = ctx.state, None
        if state is None:
            state = _mlp(plan, plan.add_norm(saved[0], None)[1], saved[0].dtype)[1]
        assert grad_delta is not None
        grad_hidden, grad_second = plan.second_backward(grad_delta, state.hidden)
        kind, cast = plan.sublayer.output.activation, plan.first.g.cast
        grad_inner = fused.gated_backward(grad_hidden, state.inner, kind, plan.gate, cast)
        del grad_hidden
        grad, grad_norm, grad_first = plan.first_backward(grad_inner, state.normed, saved, grad_residual)
        grad = grad.view(ctx.shape)
        return None, grad, grad, grad_norm, grad_first, grad_second


@dataclass
class _AttentionState:
    """State of attention's backward besides the residual."""

    qkv: Tensor
    attention: SavedAttention
    normed: tuple[Tensor, ...]
    o: tuple[Tensor, ...]


def _attention(
    plan: FusedAttention,
    context: AttentionContext,
    batch: int,
    angles: tuple[Tensor, Tensor] | None,
    normed: Tensor | Fp8,
    dtype: torch.dtype,
) -> tuple[QuantizedOperand, _AttentionState]:
    """Return the second layer's input, which is as far as a recomputation has to go, and the state."""
    sublayer, layout = plan.sublayer, plan.layout
    rows, kept_normed = plan.first.x.split(normed)
    qkv = plan.first.output(rows, dtype)
    del rows, normed
    q_weight, k_weight = (None if n is None else n.weight for n in (sublayer.q_norm, sublayer.k_norm))
    q_NHC, k_NKC = fused.qk_norm_rope(qkv, q_weight, k_weight, angles, layout)
    q_BTHC, k_BTKC = (x.view(batch, -1, *x.shape[1:]) for x in (q_NHC, k_NKC))
    v_BTKC = qkv.view(batch, -1, sublayer.heads + 2 * sublayer.kv_heads, sublayer.head_dim)[
        :, :, -sublayer.kv_heads :
    ]
    o_BTHC, saved = attention_forward(q_BTHC, k_BTKC, v_BTKC, context)
    rows, kept_o = plan.second.x.split(o_BTHC.reshape(qkv.shape[0], -1).contiguous())
    return rows, _AttentionState(qkv, saved, kept_normed, kept_o)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: FusedAttention,
        how: tuple[AttentionContext, tuple[Tensor, Tensor] | None],
        residual_BTD: Tensor,
        delta_BTD: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """weights: the norm's, the first layer's, of q's and k's norm, and the second layer's, as in `_MLP`."""
        shape, (context, angles) = residual_BTD.shape, how
        norm_weight, _, q_weight, k_weight, _ = weights
        residual, normed, rstd = plan.add_norm(
            _flat(residual_BTD), None if delta_BTD is None else _flat(delta_BTD)
        )
        rows, state = _attention(plan, context, shape[0], angles, normed, residual.dtype)
        delta = plan.second.output(rows, residual.dtype)
        ctx.plan, ctx.shape, ctx.state = plan, shape, None if plan.recompute else state
        ctx.how = how
        ctx.save_for_backward(residual, rstd, norm_weight, q_weight, k_weight)
        ctx.set_materialize_grads(False)
        return residual_BTD if delta_BTD is None else residual.view(shape), delta.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: FusedAttention = ctx.plan
        layout, (context, angles), batch = plan.layout, ctx.how, ctx.shape[0]
        grad_residual, grad_delta = grads
        *saved, q_weight, k_weight = ctx.saved_tensors
        state, ctx.state = ctx.state, None
        if state is None:
            normed = plan.add_norm(saved[0], None)[1]
            state = _attention(plan, context, batch, angles, normed, saved[0].dtype)[1]
        assert grad_delta is not None
        grad_o, grad_second = plan.second_backward(grad_delta, state.o)
        grad_o_BTHC = grad_o.view(batch, -1, layout.heads, layout.head_dim)
        grad_q, grad_k, grad_v = (_tokens_first(g) for g in attention_backward(state.attention, grad_o_BTHC))
        del grad_o, grad_o_BTHC
        grad_qkv, grad_q_weight, grad_k_weight = fused.qk_norm_rope_backward(
            (grad_q, grad_k, grad_v), state.qkv, q_weight, k_weight, angles, layout, plan.first.g.cast
        )
        del grad_q, grad_k, grad_v
        grad, grad_norm, grad_first = plan.first_backward(grad_qkv, state.normed, tuple(saved), grad_residual)
        grad = grad.view(ctx.shape)
        of_delta = grad if ctx.needs_input_grad[3] else None
        return None, None, grad, of_delta, grad_norm, grad_first, grad_q_weight, grad_k_weight, grad_second


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, eps: float, residual_BTD: Tensor, delta_BTD: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.shape = residual_BTD.shape
        residual, normed, rstd = fused.add_norm(_flat(residual_BTD), _flat(delta_BTD), weight, eps)
        assert isinstance(normed, Tensor)
        ctx.save_for_backward(residual, rstd, weight)
        ctx.set_materialize_grads(False)
        return residual.view(ctx.shape), normed.view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_residual, grad_normed = grads
        residual, rstd, weight = ctx.saved_tensors
        assert grad_normed is not None
        if grad_residual is not None:
            grad_residual = _flat(grad_residual)
        grad, grad_weight = fused.add_norm_backward(_flat(grad_normed), residual, rstd, weight, grad_residual)
        grad = grad.view(ctx.shape)
        return None, grad, grad, grad_weight.to(weight.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: QuantizedLinear, x: Tensor, weight: Tensor) -> Tensor:
        rows, kept = plan.x.split(x.contiguous())
        ctx.plan, ctx.dtype = plan, x.dtype
        ctx.save_for_backward(*kept)
        return plan.output(rows, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: QuantizedLinear = ctx.plan
        rows, kept = plan.g.split(grads[0].contiguous())
        grad = plan.input_gradient(rows, ctx.dtype)
        return None, grad, plan.weight_gradient(plan.g.columns_of(kept), plan.x.columns_of(ctx.saved_tensors))


def add_norm(norm: RMSNorm, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """(residual + delta, its norm) in one kernel each way: for the final norm, which no projection follows."""
    residual_BTD, normed_BTD = _AddNorm.apply(norm.eps, residual_BTD, delta_BTD, norm.weight)
    return residual_BTD, normed_BTD


def linear(plan: QuantizedLinear, x_NK: Tensor) -> Tensor:
    """(N, K) -> (N, M): a single quantized layer, for models that the fused sublayers do not cover."""
    y = _Linear.apply(plan, x_NK, plan.linear.weight)
    assert isinstance(y, Tensor)
    return y


def rms_norm(norm: object) -> RMSNorm:
    assert isinstance(norm, RMSNorm)
    return norm


def _flat(x_BTD: Tensor) -> Tensor:
    return x_BTD.flatten(0, 1).contiguous()


def _tokens_first(x_BTHC: Tensor) -> Tensor:
    """(B, T, H, C) -> (N, H, C) with contiguous channels and one stride from token to token."""
    B, T = x_BTHC.shape[:2]
    if x_BTHC.stride(-1) != 1 or (B > 1 and x_BTHC.stride(0) != T * x_BTHC.stride(1)):
        x_BTHC = x_BTHC.contiguous()
    return x_BTHC.flatten(0, 1)
