"""Checks with deliberately wrong numbers, run in child processes as the doctor runs its own."""

from typing import Any

import torch
from torch import Tensor

from deskside.doctor import check_attention, check_gemm
from deskside.doctor.scaled_operands import FORMATS, Format, ScaledOperand
from deskside.kernels.attention import AttentionBackend, AttentionContext, backend_named
from deskside.kernels.attention.context import register
from deskside.precision import selfcheck

RIGHT = FORMATS["fp8_row"]


def _format(multiply: Any) -> Format:
    return Format(RIGHT.quantize, multiply, RIGHT.tolerance)


def right_product() -> dict[str, Any]:
    return check_gemm.check_format(RIGHT, torch.device("cpu"))


def slightly_wrong_product() -> dict[str, Any]:
    """A kernel that is off by 3 %, which the rounding of the operands would hide."""

    def multiply(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
        return RIGHT.multiply(a, b, gradient) * 1.03

    return check_gemm.check_format(_format(multiply), torch.device("cpu"))


def zero_gradient_product() -> dict[str, Any]:
    """A library whose output is right but whose gradients are all zero."""

    def multiply(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
        product = RIGHT.multiply(a, b, gradient)
        return torch.zeros_like(product) if gradient else product

    return check_gemm.check_format(_format(multiply), torch.device("cpu"))


def zero_gradient_recipe() -> dict[str, Any]:
    """A recipe whose layer computes right outputs and input gradients, but weight gradients that are all zero."""
    return check_gemm.as_result(
        selfcheck.check_gemm(lambda x, w: x @ w.detach().T + 0 * w.sum(), 0.12, "cpu"), 0.12
    )


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return backend_named("sdpa").function(q, k, v, AttentionContext(backend="sdpa"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(torch.zeros_like(t) for t in ctx.saved_tensors)


def zero_gradient_attention() -> dict[str, Any]:
    return _attention(lambda q, k, v, context: _ZeroGradients.apply(q, k, v), window=False)


def windowless_attention() -> dict[str, Any]:
    """A backend that accepts a window and ignores it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return backend_named("sdpa").function(q, k, v, AttentionContext(backend="sdpa"))

    return _attention(attend, window=True)


def _attention(function: Any, window: bool) -> dict[str, Any]:
    register(
        AttentionBackend("planted", function, frozenset({"cpu"}), frozenset({torch.float32}), window=True)
    )
    return check_attention.check("planted", window, "cpu")
