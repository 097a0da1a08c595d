"""Fused element-wise operators of a block, forward and backward, each in one kernel on a GPU.

`reference` has them in plain torch and describes them. It runs on a CPU, and the kernels that `launch` starts under the
same names are tested against it.
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
    """Return whether the kernels can write FP8 here: they need the conversion of compute capability 8.9."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _operator(plain: Callable[P, R], needs_fp8: bool = False) -> Callable[P, R]:
    """`plain`, in the kernel of the same name if its first tensor is on a GPU (that writes FP8, with `needs_fp8`)."""
    name = plain.__name__

    @wraps(plain)
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0][0] if isinstance(args[0], tuple) else args[0]
        assert isinstance(x, torch.Tensor)
        if not x.is_cuda or (needs_fp8 and not writes_fp8(x.device)):
            return plain(*args, **kwargs)
        from deskside.kernels.fused import launch

        kernel: Callable[P, R] = getattr(launch, name)
        return kernel(*args, **kwargs)

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
