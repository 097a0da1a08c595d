"""Sorted rows in FP8, cast by the kernels that gather them or compute them from the gate.

The output and the input gradient read FP8, the weight gradient reads BF16 (`config.recipes.expert_recipe`). A kernel
that writes a tensor writes what its products read, so that no other kernel has to read it again. In other formats, the
rows come in BF16, and `quantize_rows_of_experts` quantizes them.

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
    rows, values, inverse = moe.gather_and_cast(grad_ND, routing.tokens_S)
    return SortedRows(rows, None, routing.ends_E, QuantizedOperand(values, inverse))


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
    cast = None
    if operand.format not in DTYPE:
        grad_inner, grad_weights, hidden = moe.weighted_gated_backward(*given)
    else:
        grad_inner, values, inverse, grad_weights, hidden = moe.weighted_gated_backward_fp8(*given)
        cast = QuantizedOperand(values, inverse)
    return SortedRows(grad_inner, None, ends, cast), grad_weights, SortedRows(hidden, None, ends)
