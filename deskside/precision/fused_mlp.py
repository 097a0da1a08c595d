"""The fused MLP sublayer with a manual backward, whole or in chunks of tokens (fused_sublayers.py)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deskside.kernels import fused
from deskside.kernels.cross_entropy import add_matmul
from deskside.kernels.functional import at_least_float32
from deskside.kernels.fused import Fp8
from deskside.kernels.quack_matmul import MatmulTile, gated_matmul, gated_matmul_gradient
from deskside.ops.composite import MLPSublayer
from deskside.precision.fused_sublayers import FusedSublayer, flatten_tokens
from deskside.precision.quantized_operand import QuantizedOperand


@dataclass(frozen=True)
class FusedMLP(FusedSublayer):
    """Fused MLP sublayer: (residual, delta) -> (residual, delta).

    chunk_tokens: compute this number of tokens at a time, in forward and backward; None is all of them. For products in
    16 bits or more, with `recompute`.
    gate_tiles: tiles of the products with the gate in their epilogues (`kernels/quack_matmul.py`), forward and
        backward, for which the first layer is interleaved; None is a separate kernel for the gate.
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
        """Return the output of the first layer, and its activation in the form that the second layer reads."""
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
    """`_MLP`, one chunk of tokens at a time (ALST, Bekman et al. 2025, arXiv 2506.13996).

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
