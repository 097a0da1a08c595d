"""Plain torch that operators and the references of kernels share: activations, the dtype they compute in, autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that counts nothing in a loss


def relu2(x: Tensor) -> Tensor:
    """ReLU squared (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


def gelu_new(x: Tensor) -> Tensor:
    """GPT-2's GELU: the tanh approximation of Hendrycks and Gimpel 2016 (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "relu2": relu2,
}


def at_least_float32(x: Tensor) -> torch.dtype:
    """float32, or float64 where x is (the references of the tests run in float64)."""
    return torch.promote_types(x.dtype, torch.float32)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x times a factor that is one number on its device and is rounded to x's dtype, as torch does for `x * factor`.

    That takes such a factor for a tensor to be broadcast, and reads x value by value, at a quarter of a card's
    bandwidth; the kernel for lists of tensors does not.
    """
    (product,) = torch._foreach_mul([x], factor.to(x.dtype))
    return product


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """torch.autograd.grad(outputs, inputs, upstream), to the last bit, without the import of sympy that it begins with.

    Given gradients of outputs, torch compares their sizes by way of its symbolic shapes. A scalar needs none, so here
    one is put on top of the outputs, whose backward hands `upstream` down. That takes twice the host's time of torch's
    own: for checks that run once, not for a step.
    """
    assert [one.shape for one in outputs] == [
        one.shape for one in upstream
    ]  # autograd would sum what is larger
    with torch.enable_grad():
        top = _Top.apply(len(outputs), *outputs, *upstream)
    return torch.autograd.grad(top, inputs)


class _Top(torch.autograd.Function):
    """A scalar whose gradients by `outputs` are `upstream`."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.upstream = tensors[count:]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.upstream, *(None for _ in ctx.upstream)


def give_context(device: torch.device | str) -> None:
    """Have autograd's thread of this device launch one ordinary kernel. Nothing on a CPU.

    That thread begins without a CUDA context: torch sets its device, but asks CUDA for that only where it is not the
    current one already, which the first GPU is. The runtime binds the context at the first kernel that it launches.
    cuBLAS goes by the driver and does not, so a process whose first backward begins with a product is warned of
    "no current CUDA context" (pytorch/pytorch 92055, 120131, 155900).
    """
    device = torch.device(device)
    if device.type != "cuda":
        return
    with torch.enable_grad():
        one = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad(one.exp(), one)  # backward: a multiplication
