"""Single layers with a manual backward, for use outside of fused sublayers: norms, and Linears of other sublayers."""

from typing import Any

import torch
from torch import Tensor

from deskside.kernels import fused
from deskside.ops.composite import RMSNorm
from deskside.precision.fused_sublayers import flatten_tokens
from deskside.precision.quantized_linear import QuantizedLinear


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
