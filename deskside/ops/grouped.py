"""The product of each expert's rows with its weights, with gradients, as one operator for autograd and torch.compile.

torch.compile must not look inside: the choice of a backend runs a self-check, and a loop over experts reads their
numbers of rows on the host.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.kernels import moe


def grouped_linear(x_SK: Tensor, weight_EMK: Tensor, ends_E: Tensor) -> Tensor:
    """Return x_e W_e^T for the rows x_e of each expert, (S, M). ends_E: the first row after each expert's, int32."""
    out_SM: Tensor = _grouped_matmul(x_SK.contiguous(), weight_EMK.contiguous(), ends_E, True)
    return out_SM


@torch.library.custom_op("deskside::grouped_matmul", mutates_args=())
def _grouped_matmul(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    return moe.grouped_matmul(x_SK, weight, ends_E, transpose)


@_grouped_matmul.register_fake
def _(x_SK: Tensor, weight: Tensor, ends_E: Tensor, transpose: bool) -> Tensor:
    return x_SK.new_empty(len(x_SK), weight.shape[1 if transpose else 2])


@torch.library.custom_op("deskside::grouped_weight_gradient", mutates_args=())
def _grouped_weight_gradient(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor) -> Tensor:
    return moe.grouped_weight_gradient(g_SM, x_SK, ends_E, x_SK.dtype)


@_grouped_weight_gradient.register_fake
def _(g_SM: Tensor, x_SK: Tensor, ends_E: Tensor) -> Tensor:
    return x_SK.new_empty(len(ends_E), g_SM.shape[1], x_SK.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_SK, weight, ends_E, _ = inputs
    # The gradient of a frozen weight is not needed, and so neither are the rows.
    ctx.save_for_backward(x_SK if ctx.needs_input_grad[1] else None, weight, ends_E)


def _backward(ctx: Any, grad_SM: Tensor) -> tuple[Tensor | None, ...]:
    x_SK, weight, ends_E = ctx.saved_tensors
    grad_SM = grad_SM.contiguous()
    x_needed, weight_needed, *_ = ctx.needs_input_grad
    grad_x = _grouped_matmul(grad_SM, weight, ends_E, False) if x_needed else None
    grad_weight = _grouped_weight_gradient(grad_SM, x_SK, ends_E) if weight_needed else None
    return grad_x, grad_weight, None, None


_grouped_matmul.register_autograd(_backward, setup_context=_setup_context)
