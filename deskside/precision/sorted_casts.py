"""Sorted rows in FP8, cast by the kernels that gather them or compute them from the gate.

A kernel that computes rows casts them, so that they never exist in BF16. The weight gradient reads the same values,
transposed (`fp8_rows.transpose_rows`), except that the inputs of the first product, which are not kept, are cast again
(`fp8_rows.dispatch_columns`). In other formats, the rows come in BF16, and `quantize_rows_of_experts` quantizes them.

Suffixes: see `sorted_operand`; F intermediate size.
"""

from dataclasses import replace

from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels import moe
from deskside.kernels.moe import Routing
from deskside.precision.formats import DTYPE
from deskside.precision.quantized_operand import QuantizedOperand
from deskside.precision.sorted_operand import SortedRows


def gather(x_ND: Tensor, routing: Routing, operand: Operand) -> SortedRows:
    """Return the sorted rows of tokens x, or of their gradients; the next product reads them as `operand`."""
    rows = SortedRows(x_ND, routing)
    return rows if operand.format not in DTYPE else replace(rows, cast=rows.in_fp8)


def gate(inner: Tensor, routing: Routing, activation: str, gated: bool, operand: Operand) -> SortedRows:
    """Return `moe.weighted_gated` of `inner`, (S, F); the second product reads it as `operand`."""
    given = inner, routing.weights_S, activation, gated
    if operand.format not in DTYPE:
        return SortedRows(moe.weighted_gated(*given), routing, in_order=True)
    return SortedRows(None, routing, cast=QuantizedOperand(*moe.weighted_gated_fp8(*given)))


def gate_backward(
    grad: Tensor, inner: Tensor, routing: Routing, activation: str, gated: bool, operand: Operand
) -> tuple[SortedRows, Tensor, SortedRows]:
    """Return the gradient of `inner`, that of the router's weights (S,), and the hidden values (S, F) again.

    grad: that of the hidden values. operand: what the input gradient of the first product reads of that of `inner`.
    """
    given = grad, inner, routing.weights_S, activation, gated
    if operand.format not in DTYPE:
        grad_inner, grad_weights, hidden = moe.weighted_gated_backward(*given)
        rows = (SortedRows(values, routing, in_order=True) for values in (grad_inner, hidden))
    else:
        values, inverse, grad_weights, hidden, hidden_inverse = moe.weighted_gated_backward_fp8(*given)
        casts = QuantizedOperand(values, inverse), QuantizedOperand(hidden, hidden_inverse)
        rows = (SortedRows(None, routing, cast=cast) for cast in casts)
    grad_rows, hidden_rows = rows
    return grad_rows, grad_weights, hidden_rows
