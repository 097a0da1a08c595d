"""The plan of a stacked weight of all experts in a recipe: its quantized operands and its three grouped products.

The counterpart of `QuantizedLinear` for rows that are sorted by expert. Forms that only the backward reads are made in
the backward, from the rows in bfloat16, so that nothing of them is kept in between.
"""

import torch
from torch import Tensor

from deskside.config.recipes import Recipe
from deskside.ops.moe import Experts
from deskside.precision.grouped_products import grouped_product
from deskside.precision.quantized_linear import ConvertedWeight, Quantizer, Shared
from deskside.precision.quantized_operand import UNQUANTIZED, QuantizedOperand
from deskside.precision.sorted_operand import (
    SortedRows,
    alignment,
    quantize_expert_weights,
    quantize_rows_of_experts,
)

Forms = tuple[QuantizedOperand, QuantizedOperand]  # of a weight: for the output and for the input gradient


class ExpertWeightQuantizer:
    """Quantizer of a stacked weight (E, M, K) into the forms that the output and the input gradient read."""

    def __init__(self, recipe: Recipe, shared: Shared, products: tuple[int, int]):
        self.rows, self.columns = recipe.output.right, recipe.input_gradient.right
        self.shared, self.products = shared, products
        # With square tiles, both forms hold the same numbers, and emulated products read either layout.
        self._one_form = self.rows == self.columns and self.rows.scaling == "16x16"

    def quantize_rows(self, weight_EMK: Tensor) -> tuple[QuantizedOperand, tuple[Tensor, ...]]:
        """Return the weight that the output reads, and the tensors to save for the input gradient."""
        operand = quantize_expert_weights(
            weight_EMK, self.rows, "columns", self.shared.draws, self.products[0]
        )
        if self._one_form and operand.scale is not None:
            return operand, (operand.values, operand.scale)
        return operand, (weight_EMK,)

    def quantize_columns(self, saved: tuple[Tensor, ...]) -> QuantizedOperand:
        """Return the weight that the input gradient reads, from the tensors that `quantize_rows` returned."""
        if len(saved) == 2:
            return QuantizedOperand(*saved)
        return quantize_expert_weights(saved[0], self.columns, "rows", self.shared.draws, self.products[1])


class ExpertLinear:
    """The plan of one of the experts' weights (E, M, K) in a recipe for experts.

    name: the attribute of `experts` that is the weight. number: as in `QuantizedLinear`.
    """

    def __init__(self, experts: Experts, name: str, recipe: Recipe, shared: Shared, number: int):
        self.experts, self.name, self.recipe, self.shared = experts, name, recipe, shared
        self.plain = recipe.output.right.format in UNQUANTIZED
        self._output, input_gradient, self._weight_gradient = (3 * number + i for i in range(3))
        self._input_gradient = input_gradient
        products = self._output, input_gradient
        quantizer = (
            Quantizer(recipe.output.right, recipe.input_gradient.right, shared, products)
            if self.plain
            else ExpertWeightQuantizer(recipe, shared, products)
        )
        self.converted = ConvertedWeight(quantizer, shared)

    @property
    def parameter(self) -> Tensor:
        """The weight (E, M, K)."""
        weight = getattr(self.experts, self.name)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def align(self) -> int:
        """The number that each expert's rows must be a multiple of, padding included."""
        return max(alignment(operand) for p in self.recipe.products for operand in (p.left, p.right))

    def weight(self, dtype: torch.dtype) -> Forms:
        """Return the weight's forms for the output and for the input gradient; unquantized ones in `dtype`."""
        return self.converted.get(self.parameter, dtype if self.plain else None)

    def output(self, x: SortedRows, weight: Forms, dtype: torch.dtype) -> Tensor:
        """Return the output (S, M) for inputs (S, K)."""
        operand = quantize_rows_of_experts(
            x, self.recipe.output.left, "columns", self.shared.draws, self._output
        )
        return grouped_product("output", operand, weight[0], x.routing.ends_E, dtype, self.native)

    def input_gradient(self, g: SortedRows, weight: Forms, dtype: torch.dtype) -> Tensor:
        """Return the gradient of the inputs (S, K), from that of the output (S, M)."""
        operand = quantize_rows_of_experts(
            g, self.recipe.input_gradient.left, "columns", self.shared.draws, self._input_gradient
        )
        return grouped_product("input_gradient", operand, weight[1], g.routing.ends_E, dtype, self.native)

    def weight_gradient(self, g: SortedRows, x: SortedRows) -> Tensor:
        """Return the gradient of the weight (E, M, K) in its dtype, for gradients (S, M) and inputs (S, K)."""
        product, draws = self.recipe.weight_gradient, self.shared.draws
        left = quantize_rows_of_experts(g, product.left, "rows", draws, self._weight_gradient)
        right = quantize_rows_of_experts(x, product.right, "rows", draws, self._weight_gradient)
        return grouped_product(
            "weight_gradient", left, right, g.routing.ends_E, self.parameter.dtype, self.native
        )

    @property
    def native(self) -> bool:
        """True if FP8 products run on tensor cores."""
        return self.shared.native and self.shared.caps.grouped_fp8
