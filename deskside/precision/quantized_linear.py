"""A quantized linear layer: the forms of its input, its weight and its gradient, and its three products.

    x  input      rows for the output          columns for the weight gradient
    w  weight     rows for the output          columns for the input gradient
    g  gradient   rows for the input gradient  columns for the weight gradient

A product with a tensor's "rows" form sums over the tensor's last dimension, one with its "columns" form over the first.
The two forms can have different scales, such as one per row and one per column. A weight is converted once per
optimizer step and cached, unless caching is off.

Suffixes and shapes: N tokens, K input features, M output features.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deskside.config.recipes import Operand, Recipe
from deskside.kernels import fused
from deskside.kernels.fused import Cast, Fp8
from deskside.kernels.quack_matmul import MatmulTile, deinterleave, interleave
from deskside.ops.linear import Linear
from deskside.precision.formats import DTYPE
from deskside.precision.hardware_caps import NONE, HardwareCaps
from deskside.precision.products import Kind, product
from deskside.precision.quantized_operand import (
    UNQUANTIZED,
    Draws,
    QuantizedOperand,
    cast_rowwise,
    cast_with_current_scale,
    quantize_operand,
)
from deskside.precision.scales import DelayedScales


@dataclass
class Shared:
    """State that all layers of a model share.

    cache: keep converted weights. hits, misses: uses of the cache, for tests.
    accumulate_inside: unquantized weight gradients are added to `weight.grad` inside the product.
    round: incremented whenever weights may have changed. The version counter of a tensor is not sufficient, because
        torch's fused AdamW and our own kernels write to weights without incrementing it.
    caps: formats that the GPU supports besides plain FP8.
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
    """Quantizer of one tensor of a layer into its two forms.

    products: the numbers of the products that use the rows form and the columns form.
    """

    def __init__(self, rows: Operand, columns: Operand, shared: Shared, products: tuple[int, int]):
        self.rows, self.columns, self.shared, self.products = rows, columns, shared, products
        # One cast writes both forms: with one scale per tensor, or with scales per row.
        self._one_cast = rows == columns and rows.format in DTYPE and rows.scaling in ("tensor", "delayed")
        self._rowwise = rows == columns and rows.format in DTYPE and rows.scaling == "row"
        # With square tiles, a matrix and its transpose are the same numbers. Emulated products read either layout, so
        # one form is enough.
        tiles = rows == columns and rows.scaling == "16x16" and rows.rounding == "nearest"
        self._one_form = tiles and not shared.caps.fp4
        self._slot = None
        if self._one_cast and rows.scaling == "delayed":
            self._slot = shared.scales.add_slot(DTYPE[rows.format])

    @property
    def cast(self) -> Cast | None:
        """The cast that the kernel that produces the tensor can apply itself, or None."""
        return self._delayed_cast if fused.writes_fp8(self.shared.scales.device) else None

    @property
    def _delayed_cast(self) -> Cast | None:
        """The cast with the delayed scale, or None if there is no such scale (yet)."""
        if self._slot is None or not self.shared.scales.ready:
            return None
        return self.shared.scales.cast(self._slot)

    def quantize_rows(self, x: Tensor | Fp8) -> tuple[QuantizedOperand, tuple[Tensor, ...]]:
        """Return the rows form of x, and the tensors that `quantize_columns` needs to make the columns form later."""
        if self._rowwise:
            assert isinstance(x, Tensor)
            fp8, row_inverse, column_inverse = cast_rowwise(x, DTYPE[self.rows.format])
            return QuantizedOperand(fp8.rows, row_inverse), (fp8.columns, column_inverse)
        if not self._one_cast:
            assert isinstance(x, Tensor)
            operand = quantize_operand(
                x, self.rows, "columns", self.shared.draws, self.products[0], self.shared.caps.fp4
            )
            if self._one_form and operand.scale is not None:
                return operand, (operand.values, operand.scale)
            return operand, (x,)
        if isinstance(x, Tensor) and (cast := self._delayed_cast) is not None:
            x = fused.cast_fp8(x, cast)
        if isinstance(x, Fp8):
            assert self._slot is not None
            inverse = self.shared.scales.inverse_of(self._slot)
        else:
            amax_out = None if self._slot is None else self.shared.scales.cast(self._slot).amax
            x, inverse = cast_with_current_scale(x, DTYPE[self.rows.format], amax_out)
        return QuantizedOperand(x.rows, inverse), (x.columns, inverse)

    def quantize_columns(self, saved: tuple[Tensor, ...]) -> QuantizedOperand:
        """Return the columns form, made from the tensors that `quantize_rows` returned for it."""
        if len(saved) == 2:  # values and scale: already quantized
            return QuantizedOperand(saved[0], saved[1], transposed=self._one_cast or self._rowwise)
        return quantize_operand(
            saved[0], self.columns, "rows", self.shared.draws, self.products[1], self.shared.caps.fp4
        )


class WeightQuantizer(Protocol):
    """Quantizer of a weight into its two forms, with the methods of `Quantizer`."""

    def quantize_rows(self, x: Tensor, /) -> tuple[QuantizedOperand, tuple[Tensor, ...]]: ...
    def quantize_columns(self, saved: tuple[Tensor, ...], /) -> QuantizedOperand: ...


class ConvertedWeight:
    """Cache of a weight's two forms, converted once per optimizer step.

    It keeps the weight of the last `get` alive, so that a captured conversion can be replayed on it. So `get` must be
    given a parameter, never a temporary tensor: its memory would not be freed, and its values would be out of date.
    """

    def __init__(self, quantizer: WeightQuantizer, shared: Shared):
        self._quantizer, self._shared = quantizer, shared
        self.cached: tuple[object, QuantizedOperand, QuantizedOperand] | None = None
        self._source: tuple[Tensor, torch.dtype | None] | None = None  # parameter and dtype of the last `get`
        self.interleaved = False

    def interleave(self) -> None:
        """Interleave the rows of gate and up in both forms from now on (`kernels/quack_matmul.py`).

        Gate and up are then interleaved in the output of the layer and in its gradient, too.
        """
        self.interleaved = True
        self.clear()

    def get(
        self, weight: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Return the rows form and the columns form of the weight, which is cast to `dtype` first unless it is None.

        weight: a parameter, which is kept alive (see the class).
        """
        key = self._key(weight, dtype)
        if self.cached is not None and self.cached[0] == key:
            self._shared.hits += 1
            return self.cached[1], self.cached[2]
        self._shared.misses += 1
        self._source = weight, dtype
        weight = weight.detach() if dtype is None else weight.detach().to(dtype)
        rows, saved = self._quantizer.quantize_rows(interleave(weight) if self.interleaved else weight)
        columns = self._quantizer.quantize_columns(saved)
        if self._shared.cache:
            self.cached = (key, rows, columns)
        return rows, columns

    @property
    def in_own_memory(self) -> bool:
        """True if the cached forms have memory of their own. In FP32, they are the weight itself."""
        if self.cached is None or self._source is None:
            return False
        weight = self._source[0].untyped_storage().data_ptr()
        return any(form.values.untyped_storage().data_ptr() != weight for form in self.cached[1:])

    def clear(self) -> None:
        """Drop the cached forms."""
        self.cached = None

    def convert(self) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Convert the weight of the last `get` again, into new tensors, and return its forms, which are cached."""
        assert self._source is not None
        self.cached = None
        return self.get(*self._source)

    def use(self, forms: tuple[QuantizedOperand, QuantizedOperand]) -> None:
        """Cache these forms, which `convert` returned and whose tensors now hold the converted current weight."""
        assert self._source is not None
        self.cached = (self._key(*self._source), *forms)

    def _key(self, weight: Tensor, dtype: torch.dtype | None) -> tuple[object, ...]:
        return self._shared.round, weight._version, weight.data_ptr(), dtype


class QuantizedLinear:
    """The plan of a `Linear` in a recipe: quantizers of its input (x), weight (w) and gradient (g), and its products.

    number: distinguishes the products of this layer from those of other layers.
    tiles: for the unquantized products that torch does not compute.
    """

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
        self.plain = recipe.output.right.format in UNQUANTIZED
        self.converted = ConvertedWeight(self.w, shared)
        self.tiles: dict[str, MatmulTile] = {}  # by kind of product

    def output(self, x: QuantizedOperand, dtype: torch.dtype) -> Tensor:
        """Return the output (N, M) in `dtype`. x: the rows form of the input (N, K)."""
        return self._product("output", x, self.weight(dtype)[0], dtype)

    def input_gradient(self, g: QuantizedOperand, dtype: torch.dtype) -> Tensor:
        """Return the gradient of the input (N, K) in `dtype`. g: the rows form of the gradient (N, M)."""
        return self._product("input_gradient", g, self.weight(dtype)[1], dtype)

    def weight_gradient(self, g: QuantizedOperand, x: QuantizedOperand) -> Tensor | None:
        """Return the gradient (M, K) in the weight's dtype, or None if the product has added it to `weight.grad`.

        g, x: the columns forms of the gradient (N, M) and the input (N, K).
        """
        weight = self.linear.weight
        if self.converted.interleaved:
            return deinterleave(self._product("weight_gradient", g, x, weight.dtype))
        if self.shared.accumulate_inside and weight.grad is not None and g.scale is None and g.values.is_cuda:
            total = weight.grad
            torch.addmm(total, g.values.T, x.values, out_dtype=total.dtype, out=total)
            return None
        return self._product("weight_gradient", g, x, weight.dtype)

    def _product(
        self, kind: Kind, left: QuantizedOperand, right: QuantizedOperand, dtype: torch.dtype
    ) -> Tensor:
        tile = self.tiles.get(kind)
        return product(kind, left, right, dtype, self.shared.native, self.shared.caps.mxfp8, tile)

    def weight(self, dtype: torch.dtype) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Return the rows form and the columns form of the weight, for products in `dtype`."""
        return self.converted.get(self.linear.weight, dtype if self.plain else None)
