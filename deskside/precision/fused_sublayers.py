"""Fused attention and MLP sublayers with a manual backward and with products in their recipe's formats.

Autograd passes gradients between nodes in the dtype of the activation. A gradient that a kernel writes in FP8, once as
it is and once transposed, cannot be passed this way. So one autograd node computes a whole sublayer, from (residual,
delta) to (residual, delta), and every tensor inside has the form that the next product reads:

    forward    add + norm (+ cast) -> product -> QK-norm + RoPE, attention -> product
               add + norm (+ cast) -> product -> activation * gate (+ cast) -> product
    backward   the same steps in reverse order

BF16 runs the same code without the casts. Activation checkpointing is part of the node: with `recompute`, it saves no
activations but the residual and 1 / RMS, and the backward recomputes the rest. The first backward frees the saved
state, so a second one through the same graph (`retain_graph=True`) recomputes it.

Suffixes: N tokens (B sequences of T), D hidden size, H heads, K key-value heads, C channels of a head.
"""

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
from deskside.kernels.cross_entropy import add_matmul
from deskside.kernels.functional import at_least_float32
from deskside.kernels.fused import Fp8, QkvLayout
from deskside.kernels.quack_matmul import MatmulTile, gated_matmul, gated_matmul_gradient
from deskside.ops.composite import AttentionSublayer, MLPSublayer, RMSNorm
from deskside.precision.quantized_linear import QuantizedLinear
from deskside.precision.quantized_operand import QuantizedOperand

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FusedSublayer:
    """A sublayer and the plans of its two Linears. `recompute`: the backward starts from the residual again."""

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
        self, grad_delta_BTD: Tensor, saved_input: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Backward of the second layer. Returns the gradients of its input and of its weight.

        saved_input: the tensors that `Quantizer.quantize_rows` saved of the layer's input.
        """
        plan = self.second
        rows, saved_grad = plan.g.quantize_rows(flatten_tokens(grad_delta_BTD))
        grad = plan.input_gradient(rows, grad_delta_BTD.dtype)
        grad_weight = plan.weight_gradient(
            plan.g.quantize_columns(saved_grad), plan.x.quantize_columns(saved_input)
        )
        return grad, grad_weight

    def first_backward(
        self,
        grad_output: Tensor | Fp8,
        saved_input: tuple[Tensor, ...],
        saved_norm: tuple[Tensor, Tensor, Tensor],
        grad_residual_BTD: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Backward of the first layer and the norm.

        Returns the gradient of residual and delta (which is the same), and those of the norm's and the layer's weight.
        saved_norm: the residual, the norm's 1 / RMS and its weight.
        """
        plan, (residual, rstd, norm_weight) = self.first, saved_norm
        rows, saved_grad = plan.g.quantize_rows(grad_output)
        grad_normed = plan.input_gradient(rows, residual.dtype)
        grad_weight = plan.weight_gradient(
            plan.g.quantize_columns(saved_grad), plan.x.quantize_columns(saved_input)
        )
        grad_residual = None if grad_residual_BTD is None else flatten_tokens(grad_residual_BTD)
        grad, grad_norm = fused.add_norm_backward(grad_normed, residual, rstd, norm_weight, grad_residual)
        return grad, grad_norm.to(norm_weight.dtype), grad_weight


@dataclass(frozen=True)
class FusedMLP(FusedSublayer):
    """Fused MLP sublayer: (residual, delta) -> (residual, delta).

    chunk_tokens: compute this number of tokens at a time, in forward and backward; None is all of them. For products in
    16 bits or more, with `recompute`.
    gate_tiles: of the products with the gate in their epilogues (`kernels/quack_matmul.py`), forward and backward, for
        which the first layer is interleaved; None is a separate kernel for the gate.
    """

    sublayer: MLPSublayer
    chunk_tokens: int | None = None
    gate_tiles: tuple[MatmulTile, MatmulTile] | None = None

    @cached_property
    def gated(self) -> bool:
        return len(self.first.linear.slices) == 2

    @property
    def has_silu_gate(self) -> bool:
        return self.gated and self.sublayer.output.activation == "silu"

    def __call__(self, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.norm.weight, self.first.linear.weight, self.second.linear.weight)
        node = _MLP if self.chunk_tokens is None else _ChunkedMLP
        residual_BTD, delta_BTD = node.apply(self, residual_BTD, delta_BTD, *weights)
        return residual_BTD, delta_BTD

    def inner_and_hidden(self, rows: QuantizedOperand, dtype: torch.dtype) -> tuple[Tensor, Tensor | Fp8]:
        """Return the output of the first layer, and the activation of it as the second layer reads it."""
        if self.gate_tiles is not None:
            return gated_matmul(rows.values, self.first.weight(dtype)[0].values, self.gate_tiles[0])
        inner = self.first.output(rows, dtype)
        return inner, fused.gated(inner, self.sublayer.output.activation, self.gated, self.second.x.cast)

    def inner_gradient(
        self, grad_delta_BTD: Tensor, state: "_MLPState"
    ) -> tuple[Tensor | Fp8, Tensor | None]:
        """Return the gradients of the first layer's output and of the second layer's weight."""
        if self.gate_tiles is None:
            grad_hidden, grad_second = self.second_backward(grad_delta_BTD, state.hidden)
            activation, cast = self.sublayer.output.activation, self.first.g.cast
            return fused.gated_backward(grad_hidden, state.inner, activation, self.gated, cast), grad_second
        rows, saved = self.second.g.quantize_rows(flatten_tokens(grad_delta_BTD))
        weight = self.second.weight(grad_delta_BTD.dtype)[1].values
        grad_inner = gated_matmul_gradient(rows.values, weight, state.inner, self.gate_tiles[1])
        columns = self.second.g.quantize_columns(saved), self.second.x.quantize_columns(state.hidden)
        return grad_inner, self.second.weight_gradient(*columns)


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
class _MLPState:
    """Values that the MLP's backward needs besides the residual."""

    inner: Tensor  # output of the first layer
    normed: tuple[Tensor, ...]  # saved input of the first layer
    hidden: tuple[Tensor, ...]  # saved input of the second layer


def _mlp(plan: FusedMLP, normed: Tensor | Fp8, dtype: torch.dtype) -> tuple[QuantizedOperand, _MLPState]:
    """Compute the MLP from the norm's output up to the second layer's input. Returns this input and the saved state.

    A recomputation in the backward needs no more than this.
    """
    rows, saved_normed = plan.first.x.quantize_rows(normed)
    inner, hidden = plan.inner_and_hidden(rows, dtype)
    del rows, normed
    rows, saved_hidden = plan.second.x.quantize_rows(hidden)
    return rows, _MLPState(inner, saved_normed, saved_hidden)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: FusedMLP, residual_BTD: Tensor, delta_BTD: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """weights: of the norm and both layers. They are also in `plan`; as inputs, they get gradients."""
        shape = residual_BTD.shape
        residual, normed, rstd = plan.add_norm(flatten_tokens(residual_BTD), flatten_tokens(delta_BTD))
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
        grad_inner, grad_second = plan.inner_gradient(grad_delta, state)
        grad, grad_norm, grad_first = plan.first_backward(grad_inner, state.normed, saved, grad_residual)
        grad = grad.view(ctx.shape)
        return None, grad, grad, grad_norm, grad_first, grad_second


class _ChunkedMLP(torch.autograd.Function):
    """`_MLP` for one chunk of tokens after the other (ALST, Bekman et al. 2025, arXiv 2506.13996).

    The MLP has no interaction between tokens, so only the weight gradients are sums over chunks. They are added up in
    float32, which differs from one product by the order of the additions.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: FusedMLP, residual_BTD: Tensor, delta_BTD: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """weights: as in `_MLP`."""
        shape = residual_BTD.shape
        residual, normed, rstd = plan.add_norm(flatten_tokens(residual_BTD), flatten_tokens(delta_BTD))
        assert isinstance(normed, Tensor) and plan.chunk_tokens is not None
        delta = torch.empty_like(residual)
        for part in _chunks(len(residual), plan.chunk_tokens):
            rows = _mlp(plan, normed[part], residual.dtype)[0]
            delta[part] = plan.second.output(rows, residual.dtype)
        ctx.plan, ctx.shape = plan, shape
        ctx.save_for_backward(residual, rstd, *weights)
        ctx.set_materialize_grads(False)
        return residual.view(shape), delta.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: FusedMLP = ctx.plan
        residual, rstd, *weights = ctx.saved_tensors
        dtype, activation = residual.dtype, plan.sublayer.output.activation
        assert grads[1] is not None and plan.chunk_tokens is not None
        grad_residual = None if grads[0] is None else flatten_tokens(grads[0])
        grad_delta = flatten_tokens(grads[1])
        grad = torch.empty_like(residual)
        totals = [torch.zeros_like(weight, dtype=at_least_float32(weight)) for weight in weights]
        norm_total, first_total, second_total = totals
        for part in _chunks(len(residual), plan.chunk_tokens):
            normed = plan.add_norm(residual[part], None)[1]
            state = _mlp(plan, normed, dtype)[1]
            assert isinstance(normed, Tensor)
            rows, _ = plan.second.g.quantize_rows(grad_delta[part])
            grad_hidden = plan.second.input_gradient(rows, dtype)
            add_matmul(second_total, grad_delta[part].T, state.hidden[0])
            grad_inner = fused.gated_backward(grad_hidden, state.inner, activation, plan.gated, None)
            del grad_hidden
            assert isinstance(grad_inner, Tensor)
            rows, _ = plan.first.g.quantize_rows(grad_inner)
            grad_normed = plan.first.input_gradient(rows, dtype)
            add_matmul(first_total, grad_inner.T, normed)
            part_residual = None if grad_residual is None else grad_residual[part]
            grad[part], grad_norm = fused.add_norm_backward(
                grad_normed, residual[part], rstd[part], weights[0], part_residual
            )
            norm_total.add_(grad_norm)
        grad = grad.view(ctx.shape)
        return None, grad, grad, *(t.to(w.dtype) for t, w in zip(totals, weights, strict=True))


def _chunks(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


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
    """Compute attention from the norm's output up to the second layer's input, as `_mlp` does.

    Without `save`, the state of attention itself is None.
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
        """weights: of the norm, the first layer, the norms of q and k, and the second layer, as in `_MLP`."""
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


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, eps: float, residual_BTD: Tensor, delta_BTD: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.shape = residual_BTD.shape
        delta = None if delta_BTD is None else flatten_tokens(delta_BTD)
        residual, normed, rstd = fused.add_norm(flatten_tokens(residual_BTD), delta, weight, eps)
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
            grad_residual = flatten_tokens(grad_residual)
        grad, grad_weight = fused.add_norm_backward(
            flatten_tokens(grad_normed), residual, rstd, weight, grad_residual
        )
        grad = grad.view(ctx.shape)
        return None, grad, grad if ctx.needs_input_grad[2] else None, grad_weight.to(weight.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: QuantizedLinear, x: Tensor, weight: Tensor) -> Tensor:
        rows, saved = plan.x.quantize_rows(x.contiguous())
        ctx.plan, ctx.dtype = plan, x.dtype
        ctx.save_for_backward(*saved)
        return plan.output(rows, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: QuantizedLinear = ctx.plan
        rows, saved_grad = plan.g.quantize_rows(grads[0].contiguous())
        grad = plan.input_gradient(rows, ctx.dtype)
        grad_weight = plan.weight_gradient(
            plan.g.quantize_columns(saved_grad), plan.x.quantize_columns(ctx.saved_tensors)
        )
        return None, grad, grad_weight


def add_norm(norm: RMSNorm, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return residual + delta and its norm. For the final norm, which is not followed by projections."""
    residual_BTD, normed_BTD = _AddNorm.apply(norm.eps, residual_BTD, delta_BTD, norm.weight)
    return residual_BTD, normed_BTD


def output_norm(norm: RMSNorm, x_BTD: Tensor) -> Tensor:
    """Return the norm of a sublayer's output."""
    normed_BTD = _AddNorm.apply(norm.eps, x_BTD, None, norm.weight)[1]
    assert isinstance(normed_BTD, Tensor)
    return normed_BTD


def linear(plan: QuantizedLinear, x_NK: Tensor) -> Tensor:
    """Apply a single quantized Linear, (N, in) -> (N, out), for sublayers that cannot run fused."""
    y = _Linear.apply(plan, x_NK, plan.linear.weight)
    assert isinstance(y, Tensor)
    return y


def rms_norm(norm: object) -> RMSNorm:
    """Narrow the type of a norm that is known to be an RMSNorm."""
    assert isinstance(norm, RMSNorm)
    return norm


def flatten_tokens(x_BTD: Tensor) -> Tensor:
    return x_BTD.flatten(0, 1).contiguous()


def _flatten_heads(x_BTHC: Tensor) -> Tensor:
    """Flatten (B, T, H, C) to (N, H, C), with contiguous channels and one stride between tokens."""
    B, T = x_BTHC.shape[:2]
    if x_BTHC.stride(-1) != 1 or (B > 1 and x_BTHC.stride(0) != T * x_BTHC.stride(1)):
        x_BTHC = x_BTHC.contiguous()
    return x_BTHC.flatten(0, 1)
