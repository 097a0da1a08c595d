"""Fused element-wise operators of a transformer block, forward and backward: one or two Triton kernels each on a GPU.

`reference` documents the operators and implements them in plain torch, for CPUs and as the reference of the tests.
`launch` has functions of the same names that launch the kernels.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

from deskside.kernels.fused import reference
from deskside.kernels.fused.reference import Cast, Fp8, QkvLayout

__all__ = [
    "Cast",
    "Fp8",
    "QkvLayout",
    "add_norm",
    "add_norm_backward",
    "cast_both",
    "cast_fp8",
    "gated",
    "gated_backward",
    "row_col_amax",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "transpose",
    "writes_fp8",
]

P = ParamSpec("P")
R = TypeVar("R")


@cache
def writes_fp8(device: torch.device) -> bool:
    """Return True unless `device` is a GPU below compute capability 8.9, which cannot convert to FP8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _operator(plain: Callable[P, R], needs_fp8: bool = False) -> Callable[P, R]:
    """Return an operator that calls the function of the same name in `launch` for CUDA tensors, and `plain` for others.

    needs_fp8: also call `plain` on GPUs that cannot convert to FP8.
    """
    name = plain.__name__

    @wraps(plain)
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(x, torch.Tensor)
        if not x.is_cuda or (needs_fp8 and not writes_fp8(x.device)):
            return plain(*args, **kwargs)
        from deskside.kernels.fused import launch

        launcher: Callable[P, R] = getattr(launch, name)
        return launcher(*args, **kwargs)

    return operator


cast_fp8 = _operator(reference.cast_fp8, needs_fp8=True)
cast_both = _operator(reference.cast_both, needs_fp8=True)
row_col_amax = _operator(reference.row_col_amax)
transpose = _operator(reference.transpose)
add_norm = _operator(reference.add_norm)
add_norm_backward = _operator(reference.add_norm_backward)
qk_norm_rope = _operator(reference.qk_norm_rope)
qk_norm_rope_backward = _operator(reference.qk_norm_rope_backward)
gated = _operator(reference.gated)
gated_backward = _operator(reference.gated_backward)
