"""A quantized linear layer: the forms of its input, its weight and its gradient, and its three products.

    x  input      rows for the output          columns for the weight gradient
    w  weight     rows for the output          columns for the input gradient
    g  gradient   rows for the input gradient  columns for the weight gradient

The product of a tensor's "rows" form sums over its last dimension, the product of its "columns" form over its first.
Each form has its own scales, because a scale must be constant along the summed dimension. A weight is converted once
per optimizer step and cached, unless caching is off.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.config.recipes import Operand, Recipe
from deskside.kernels import fused
from deskside.kernels.fused import Cast, Fp8
from deskside.ops.linear import Linear
from deskside.precision.formats import DTYPE
from deskside.precision.hardware_caps import NONE, HardwareCaps
from deskside.precision.products import Kind, product
from deskside.precision.quantized_operand import (
    PLAIN,
    Draws,
    QuantizedOperand,
    cast_with_own_scale,
    cast_with_scales_of_rows,
    quantize_operand,
)
from deskside.precision.scales import DelayedScales


@dataclass
class Shared:
    """State that all layers of a model share. `cache`: keep converted weights; hits and misses are counted.

    round: incremented when weights may have changed. Their version counter does not tell: torch's fused AdamW and our
    own kernels write to weights without incrementing it. caps: formats that the GPU supports besides plain FP8.
    """

    draws: Draws
    scales: DelayedScales
    native: bool
    cache: bool
    accumulate_inside: bool = False
    hits: int = 0
    misses: int = 0
    round: int = 0
    caps: HardwareCaps = NONE


class Quantizer:
    """Quantizer of one tensor of a layer, in its two forms. `products`: the numbers of the products that use them."""

    def __init__(self, rows: Operand, columns: Operand, shared: Shared, products: tuple[int, int]):
        self.rows, self.columns, self.shared, self.products = rows, columns, shared, products
        self._one_cast = rows == columns and rows.format in DTYPE and rows.scaling in ("tensor", "delayed")
        self._by_row = rows == columns and rows.format in DTYPE and rows.scaling == "row"
        # Square tiles: the matrix and its transpose are the same numbers, and an emulated product takes either layout.
        tiles = rows == columns and rows.scaling == "16x16" and rows.rounding == "nearest"
        self._one_form = tiles and not shared.caps.fp4
        self._slot = None
        if self._one_cast and rows.scaling == "delayed":
            self._slot = shared.scales.add(DTYPE[rows.format])

    @property
    def cast(self) -> Cast | None:
        """The cast that the producing kernel can apply itself, or None."""
        return self._cast if fused.writes_fp8(self.shared.scales.device) else None

    @property
    def _cast(self) -> Cast | None:
        """The cast with the delayed scale, once there is one."""
        if self._slot is None or not self.shared.scales.ready:
            return None
        return self.shared.scales.cast(self._slot)

    def split(self, x: Tensor | Fp8) -> tuple[QuantizedOperand, tuple[Tensor, ...]]:
        """Return the rows form, and what must be kept to make the columns form later."""
        if self._by_row:
            assert isinstance(x, Tensor)
            both, of_rows, of_columns = cast_with_scales_of_rows(x, DTYPE[self.rows.format])
            return QuantizedOperand(both.rows, of_rows), (both.columns, of_columns)
        if not self._one_cast:
            assert isinstance(x, Tensor)
            made = quantize_operand(
                x, self.rows, "columns", self.shared.draws, self.products[0], self.shared.caps.fp4
            )
            if self._one_form and made.scale is not None:
                return made, (made.values, made.scale)
            return made, (x,)
        if isinstance(x, Tensor) and (cast := self._cast) is not None:
            x = fused.cast_fp8(x, cast)
        if isinstance(x, Fp8):
            assert self._slot is not None
            inverse = self.shared.scales.inverse_of(self._slot)
        else:
            noted = None if self._slot is None else self.shared.scales.cast(self._slot).amax
            x, inverse = cast_with_own_scale(x, DTYPE[self.rows.format], noted)
        return QuantizedOperand(x.rows, inverse), (x.columns, inverse)

    def columns_of(self, kept: tuple[Tensor, ...]) -> QuantizedOperand:
        """Return the columns form from the tensors that `split` kept."""
        if len(kept) == 2:
            return QuantizedOperand(kept[0], kept[1], transposed=self._one_cast or self._by_row)
        return quantize_operand(
            kept[0], self.columns, "rows", self.shared.draws, self.products[1], self.shared.caps.fp4
        )


class ConvertedWeight:
    """Cache of a weight's two forms, converted once per optimizer step."""

    def __init__(self, quantizer: Quantizer, shared: Shared):
        self._quantizer, self._shared = quantizer, shared
        self.kept: tuple[object, QuantizedOperand, QuantizedOperand] | None = None

    def of(
        self, weight: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """(rows, columns) of the weight, cast to `dtype` first where one is given."""
        key = (self._shared.round, weight._version, weight.data_ptr(), dtype)
        if self.kept is not None and self.kept[0] == key:
            self._shared.hits += 1
            return self.kept[1], self.kept[2]
        self._shared.misses += 1
        weight = weight.detach()
        rows, columns = self._quantizer.split(weight if dtype is None else weight.to(dtype))
        pair = rows, self._quantizer.columns_of(columns)
        if self._shared.cache:
            self.kept = (key, *pair)
        return pair

    def forget(self) -> None:
        """Drop it."""
        self.kept = None


class QuantizedLinear:
    """A `Linear` and its recipe. `number` distinguishes its products from those of other layers."""

    def __init__(self, linear: Linear, recipe: Recipe, shared: Shared, number: int):
        self.linear, self.shared = linear, shared
        output, input_gradient, weight_gradient = 3 * number, 3 * number + 1, 3 * number + 2
        self.x = Quantizer(
            recipe.output.left, recipe.weight_gradient.right, shared, (output, weight_gradient)
        )
        self.w = Quantizer(recipe.output.right, recipe.input_gradient.right, shared, (output, input_gradient))
        self.g = Quantizer(
            recipe.input_gradient.left, recipe.weight_gradient.left, shared, (input_gradient, weight_gradient)
        )
        self.plain = recipe.output.right.format in PLAIN
        self.converted = ConvertedWeight(self.w, shared)

    def output(self, x: QuantizedOperand, dtype: torch.dtype) -> Tensor:
        """(N, K) -> (N, M) in `dtype`, the stream's."""
        return self._product("output", x, self._weight(dtype)[0], dtype)

    def input_gradient(self, g: QuantizedOperand, dtype: torch.dtype) -> Tensor:
        """(N, M) -> (N, K) in `dtype`, the stream's."""
        return self._product("input_gradient", g, self._weight(dtype)[1], dtype)

    def weight_gradient(self, g: QuantizedOperand, x: QuantizedOperand) -> Tensor | None:
        """(M, K) in the weight's dtype, or None when it has been added to `weight.grad` inside of the product."""
        weight = self.linear.weight
        if self.shared.accumulate_inside and weight.grad is not None and g.scale is None and g.values.is_cuda:
            total = weight.grad
            torch.addmm(total, g.values.T, x.values, out_dtype=total.dtype, out=total)
            return None
        return self._product("weight_gradient", g, x, weight.dtype)

    def _product(
        self, kind: Kind, left: QuantizedOperand, right: QuantizedOperand, dtype: torch.dtype
    ) -> Tensor:
        return product(kind, left, right, dtype, self.shared.native, self.shared.caps.mxfp8)

    def _weight(self, dtype: torch.dtype) -> tuple[QuantizedOperand, QuantizedOperand]:
        return self.converted.of(self.linear.weight, dtype if self.plain else None)
