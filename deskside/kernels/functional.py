"""Helpers in plain torch for operators and reference kernels: activations, RoPE, dtype promotion, autograd."""

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of clamped_swiglu
IGNORED = -100  # tokens with this target do not count in the loss

P = ParamSpec("P")
R = TypeVar("R")


def operator(
    plain: Callable[P, R], launcher: str, supported: Callable[[torch.device], bool] = lambda device: True
) -> Callable[P, R]:
    """Return an operator that calls the function of the same name in `launcher` for CUDA tensors, `plain` for others.

    The first argument, or its first element, is a tensor and determines the device.

    launcher: name of the module whose functions launch Triton kernels, imported at the first call. supported: returns
    False for GPUs on which `plain` is called, too.
    """
    name = plain.__name__

    @wraps(plain)
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(x, Tensor)
        if not x.is_cuda or not supported(x.device):
            return plain(*args, **kwargs)
        launch: Callable[P, R] = getattr(import_module(launcher), name)  # in sys.modules after the first call
        return launch(*args, **kwargs)

    return operator


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


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up between -7 and 7, as in gpt-oss."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def activate(activation: str, *inputs: Tensor) -> Tensor:
    """Return activation(gate) * up for two inputs, activation(up) for one."""
    if activation == "clamped_swiglu":
        return clamped_swiglu(*inputs)
    hidden = ACTIVATIONS[activation](inputs[0])
    return hidden * inputs[1] if len(inputs) == 2 else hidden


def at_least_float32(x: Tensor) -> torch.dtype:
    """Return float64 for a float64 tensor (tests run their references in it) and float32 for any other."""
    return torch.promote_types(x.dtype, torch.float32)


def rotate(x_BTHC: Tensor, cos_BT1c: Tensor, sin_BT1c: Tensor) -> Tensor:
    """Rotary position embedding: rotate every pair of channels by its angle (Su et al. 2021, arXiv 2104.09864).

    The angle is proportional to the position, so the dot product of q and k depends on their positions only through the
    distance. Channels c and c + C/2 form a pair with angle position * theta^(-2c/C). This is Hugging Face's rotate-half
    layout, so Qwen and Llama weights need no permutation on import or export. cos and sin have C/2 channels and
    broadcast over rows and heads. If they have fewer, only the first channels are rotated, and the others stay.
    """
    rotated = 2 * cos_BT1c.shape[-1]
    if rotated < x_BTHC.shape[-1]:
        first_BTHc, others = x_BTHC[..., :rotated], x_BTHC[..., rotated:]
        return torch.cat((rotate(first_BTHc, cos_BT1c, sin_BT1c), others), dim=-1)
    dtype = at_least_float32(x_BTHC)
    first, second = x_BTHC.to(dtype).chunk(2, dim=-1)
    cos, sin = cos_BT1c.to(dtype), sin_BT1c.to(dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHC.dtype)


def multiply_by_scalar(x: Tensor, factor: Tensor) -> Tensor:
    """Return x times a scalar tensor on the same device, which is rounded to x's dtype first.

    `x * factor` would broadcast the scalar in a kernel without vector loads, at a quarter of the memory bandwidth;
    torch's multi-tensor kernel loads vectors.
    """
    (product,) = torch._foreach_mul([x], factor.to(x.dtype))
    return product


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Compute torch.autograd.grad(outputs, inputs, upstream), bit for bit, without importing sympy.

    torch checks the shapes of `upstream` with its symbolic shapes, which import sympy. A scalar needs no such check, so
    `_ScalarRoot` derives a scalar from the outputs, and its backward returns `upstream`. This takes twice torch's time
    on the host, so it is meant for checks that run once, not for training steps.
    """
    shapes = [output.shape for output in outputs]
    assert shapes == [grad.shape for grad in upstream]  # autograd would reduce a gradient that is larger
    with torch.enable_grad():
        root = _ScalarRoot.apply(len(outputs), *outputs, *upstream)
    return torch.autograd.grad(root, inputs)


class _ScalarRoot(torch.autograd.Function):
    """A scalar whose gradients with respect to `outputs` are `upstream`."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.upstream = tensors[count:]
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.upstream, *(None for _ in ctx.upstream)


def create_cuda_context_for_autograd(device: torch.device | str) -> None:
    """Create the CUDA context of autograd's thread for this device by launching a kernel there. No effect on a CPU.

    Without it, a process whose first backward begins with a matmul prints the warning "no current CUDA context"
    (pytorch/pytorch 92055, 120131, 155900). Autograd's thread starts without a context. The CUDA runtime creates one at
    its first kernel launch; cuBLAS uses the driver API, which does not.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return
    with torch.enable_grad():
        x = torch.ones(1, device=device, requires_grad=True)
        torch.autograd.grad(x.exp(), x)  # the backward of exp launches a multiplication
