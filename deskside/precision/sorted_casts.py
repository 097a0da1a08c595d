"""Sorted rows in FP8, cast by the kernels that produce or gather them, for the products that read them.

A tensor that two products read in two forms is read once for both; the input and the gradient of the gate are not
written in BF16 first. In other formats, and where only some of the products are in FP8, the rows come in BF16, and
`quantize_rows_of_experts` quantizes them.

Suffixes: see `sorted_operand`; F intermediate size.
"""

from torch import Tensor

from deskside.config.recipes import Operand, Recipe
from deskside.kernels import moe
from deskside.kernels.moe import Routing
from deskside.precision.formats import DTYPE
from deskside.precision.quantized_operand import QuantizedOperand
from deskside.precision.sorted_operand import SortedRows


def gathered_gradient(grad_ND: Tensor, routing: Routing, recipe: Recipe) -> SortedRows:
    """Return the rows of the gradient that the experts' second layer reads, in `recipe`, for both of its products."""
    tokens, ends = routing.tokens_S, routing.ends_E
    by_row, by_column = _fp8(recipe.input_gradient.left), _fp8(recipe.weight_gradient.left)
    if by_row and by_column:
        rows, row_inverse, columns, column_inverse = moe.cast_both(grad_ND, tokens, ends)
        return _both(None, ends, (rows, row_inverse), (columns, column_inverse))
    if by_row:
        copy, rows, inverse = moe.gather_and_cast(grad_ND, tokens)
        return _both(copy, ends, (rows, inverse))
    return SortedRows(grad_ND, tokens, ends)


def gate(inner: Tensor, routing: Routing, activation: str, gated: bool, operand: Operand) -> SortedRows:
    """Return the hidden values (S, F) of `moe.weighted_gated` for the second layer, whose input is an `operand`."""
    if _fp8(operand):
        rows = moe.weighted_gated_fp8(inner, routing.weights_S, activation, gated)
        return _both(None, routing.ends_E, rows)
    hidden = moe.weighted_gated(inner, routing.weights_S, activation, gated)
    return SortedRows(hidden, None, routing.ends_E)


def gate_backward(
    grad: Tensor,
    inner: Tensor,
    routing: Routing,
    activation: tuple[str, bool],
    recipes: tuple[Recipe, Recipe],
) -> tuple[SortedRows, Tensor, SortedRows]:
    """Return the gradient of `inner`, that of the router's weights (S,), and the hidden values (S, F) again.

    grad: that of the hidden values. activation: its name, and whether there is a gate. recipes: of both layers.
    """
    weights, ends, (first, second) = routing.weights_S, routing.ends_E, recipes
    by_row, by_column = _fp8(first.input_gradient.left), _fp8(first.weight_gradient.left)
    hidden_by_column = _fp8(second.weight_gradient.right)
    if by_row and by_column and hidden_by_column:
        *both, hidden, inverse, grad_weights = moe.weighted_gated_backward_fp8(
            grad, inner, weights, ends, *activation
        )
        rows, row_inverse, columns, column_inverse = both
        grad_inner = _both(None, ends, (rows, row_inverse), (columns, column_inverse))
        return grad_inner, grad_weights, _both(None, ends, None, (hidden, inverse))
    if by_row and not by_column and not hidden_by_column:
        copy, rows, row_inverse, grad_weights, hidden = moe.weighted_gated_backward_rows(
            grad, inner, weights, *activation
        )
        return _both(copy, ends, (rows, row_inverse)), grad_weights, SortedRows(hidden, None, ends)
    copy, grad_weights, hidden = moe.weighted_gated_backward(grad, inner, weights, *activation)
    return SortedRows(copy, None, ends), grad_weights, SortedRows(hidden, None, ends)


def _fp8(operand: Operand) -> bool:
    return operand.format in DTYPE


def _both(
    source: Tensor | None,
    ends_E: Tensor,
    rows: tuple[Tensor, Tensor] | None = None,
    columns: tuple[Tensor, Tensor] | None = None,
) -> SortedRows:
    """Return sorted rows with forms: E4M3 values and inverse scales, and those of the transpose."""
    result = SortedRows(source, None, ends_E)
    if rows is not None:
        result.forms["columns"] = QuantizedOperand(*rows)
    if columns is not None:
        result.forms["rows"] = QuantizedOperand(*columns, transposed=True)
    return result
