"""Fused element-wise operators of a transformer block, forward and backward: one or two Triton kernels each on a GPU.

`reference` documents the operators and implements them in plain torch, for CPUs and as the reference of the tests.
`launch` has functions of the same names that launch the kernels.
"""

from functools import cache

import torch

from deskside.kernels.functional import operator
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

LAUNCHER = "deskside.kernels.fused.launch"


@cache
def writes_fp8(device: torch.device) -> bool:
    """Return True unless `device` is a GPU below compute capability 8.9, which cannot convert to FP8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


cast_fp8 = operator(reference.cast_fp8, LAUNCHER, supported=writes_fp8)
cast_both = operator(reference.cast_both, LAUNCHER, supported=writes_fp8)
row_col_amax = operator(reference.row_col_amax, LAUNCHER)
transpose = operator(reference.transpose, LAUNCHER)
add_norm = operator(reference.add_norm, LAUNCHER)
add_norm_backward = operator(reference.add_norm_backward, LAUNCHER)
qk_norm_rope = operator(reference.qk_norm_rope, LAUNCHER)
qk_norm_rope_backward = operator(reference.qk_norm_rope_backward, LAUNCHER)
gated = operator(reference.gated, LAUNCHER)
gated_backward = operator(reference.gated_backward, LAUNCHER)
