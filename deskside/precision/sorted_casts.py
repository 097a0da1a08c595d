"""Sorted rows in FP8, cast by the kernels that gather them or compute them from the gate.

A kernel that computes rows casts them, so that they never exist in BF16. The weight gradient reads the same values,
transposed (`fp8_rows.transpose_rows`). In other formats, the rows come in BF16, and `quantize_rows_of_experts`
quantizes them.

Suffixes: see `sorted_operand`; F intermediate size.
"""

from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels import moe
from deskside.kernels.moe import Routing
from deskside.precision.formats import DTYPE
from deskside.precision.quantized_operand import QuantizedOperand
from deskside.precision.sorted_operand import SortedRows


def gather_gradient(grad_ND: Tensor, routing: Routing, operand: Operand) -> SortedRows:
    """Return the sorted rows of a gradient; the input gradient reads them as `operand`."""
    if operand.format not in DTYPE:
        return SortedRows(grad_ND, routing.tokens_S, routing.ends_E)
    cast = QuantizedOperand(*moe.cast_rows(grad_ND, routing.tokens_S))
    return SortedRows(None, None, routing.ends_E, cast)


def gate(inner: Tensor, routing: Routing, activation: str, gated: bool, operand: Operand) -> SortedRows:
    """Return `moe.weighted_gated` of `inner`, (S, F); the second product reads it as `operand`."""
    given = inner, routing.weights_S, activation, gated
    if operand.format not in DTYPE:
        return SortedRows(moe.weighted_gated(*given), None, routing.ends_E)
    return SortedRows(None, None, routing.ends_E, QuantizedOperand(*moe.weighted_gated_fp8(*given)))


def gate_backward(
    grad: Tensor, inner: Tensor, routing: Routing, activation: str, gated: bool, operand: Operand
) -> tuple[SortedRows, Tensor, SortedRows]:
    """Return the gradient of `inner`, that of the router's weights (S,), and the hidden values (S, F) again.

    grad: that of the hidden values. operand: what the input gradient of the first product reads of that of `inner`.
    """
    given, ends = (grad, inner, routing.weights_S, activation, gated), routing.ends_E
    if operand.format not in DTYPE:
        grad_inner, grad_weights, hidden = moe.weighted_gated_backward(*given)
        return SortedRows(grad_inner, None, ends), grad_weights, SortedRows(hidden, None, ends)
    values, inverse, grad_weights, hidden, hidden_inverse = moe.weighted_gated_backward_fp8(*given)
    casts = (QuantizedOperand(values, inverse), QuantizedOperand(hidden, hidden_inverse))
    grad_rows, hidden_rows = (SortedRows(None, None, ends, cast) for cast in casts)
    return grad_rows, grad_weights, hidden_rows
