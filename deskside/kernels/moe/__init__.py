"""Operators of a mixture of experts: routing, gathering rows, the gate with the router's weight, grouped products.

`reference` documents the operators and implements them in plain torch, for CPUs and as the reference of the tests.
`moe_launch` has functions of the same names that launch Triton kernels, and `grouped` those of the grouped products.
"""

from deskside.kernels.functional import operator
from deskside.kernels.moe import reference
from deskside.kernels.moe.reference import Routing

__all__ = [
    "Routing",
    "combine",
    "dispatch",
    "grouped_matmul",
    "grouped_weight_gradient",
    "route",
    "route_backward",
    "weighted_gated",
    "weighted_gated_backward",
]

LAUNCHER, GROUPED = "deskside.kernels.moe.moe_launch", "deskside.kernels.moe.grouped"

route = operator(reference.route, LAUNCHER)
route_backward = operator(reference.route_backward, LAUNCHER)
dispatch = operator(reference.dispatch, LAUNCHER)
combine = operator(reference.combine, LAUNCHER)
weighted_gated = operator(reference.weighted_gated, LAUNCHER)
weighted_gated_backward = operator(reference.weighted_gated_backward, LAUNCHER)
grouped_matmul = operator(reference.grouped_matmul, GROUPED)
grouped_weight_gradient = operator(reference.grouped_weight_gradient, GROUPED)
