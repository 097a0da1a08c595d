"""Operators of a mixture of experts: routing, gathering rows, casting them to FP8, the gate with the router's weight,
grouped products.

`reference` and `fp8_rows` document the operators and implement them in plain torch, for CPUs and as the reference of
the tests. `moe_launch` and `fp8_launch` have functions of the same names that launch Triton kernels, and `grouped`
those of the grouped products.
"""

from collections.abc import Sequence

import torch

from deskside.kernels.functional import operator
from deskside.kernels.fused import writes_fp8
from deskside.kernels.moe import fp8_rows, reference
from deskside.kernels.moe.reference import Routing

__all__ = [
    "Routing",
    "cast_rows",
    "cast_weight_columns",
    "combine",
    "dispatch",
    "dispatch_columns",
    "dispatch_fp8",
    "gathered_gated",
    "grouped_backend",
    "grouped_matmul",
    "grouped_weight_gradient",
    "route",
    "route_backward",
    "transpose_rows",
    "weighted_gated",
    "weighted_gated_backward",
    "weighted_gated_backward_fp8",
    "weighted_gated_fp8",
]

LAUNCHER, GROUPED = "deskside.kernels.moe.moe_launch", "deskside.kernels.moe.grouped"
FP8_LAUNCHER = "deskside.kernels.moe.fp8_launch"

route = operator(reference.route, LAUNCHER)
route_backward = operator(reference.route_backward, LAUNCHER)
dispatch = operator(reference.dispatch, LAUNCHER)
combine = operator(reference.combine, LAUNCHER)
weighted_gated = operator(reference.weighted_gated, LAUNCHER)
weighted_gated_backward = operator(reference.weighted_gated_backward, LAUNCHER)
gathered_gated = operator(reference.gathered_gated, GROUPED)
grouped_matmul = operator(reference.grouped_matmul, GROUPED)
grouped_weight_gradient = operator(reference.grouped_weight_gradient, GROUPED)
cast_rows = operator(fp8_rows.cast_rows, FP8_LAUNCHER, supported=writes_fp8)
dispatch_fp8 = operator(fp8_rows.dispatch_fp8, FP8_LAUNCHER, supported=writes_fp8)
dispatch_columns = operator(fp8_rows.dispatch_columns, FP8_LAUNCHER, supported=writes_fp8)
transpose_rows = operator(fp8_rows.transpose_rows, FP8_LAUNCHER, supported=writes_fp8)
weighted_gated_fp8 = operator(fp8_rows.weighted_gated_fp8, FP8_LAUNCHER, supported=writes_fp8)
weighted_gated_backward_fp8 = operator(
    fp8_rows.weighted_gated_backward_fp8, FP8_LAUNCHER, supported=writes_fp8
)
cast_weight_columns = operator(fp8_rows.cast_weight_columns, FP8_LAUNCHER, supported=writes_fp8)


def grouped_backend(device: torch.device, dtype: torch.dtype, shape: Sequence[int], rows: int) -> str:
    """Return the backend of `grouped_matmul` in `dtype` for weights (E, M, K): torch, triton or loop, see `grouped`.

    rows: of all experts together. A loop waits for the device, the others do not. A CPU has only the loop.
    """
    if device.type != "cuda":
        return "loop"
    from deskside.kernels.moe import grouped

    return grouped.grouped_backend(device, dtype, shape, rows)
