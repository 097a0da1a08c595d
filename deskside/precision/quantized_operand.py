"""Quantize tensors into operands of a product, in the formats of a recipe.

An operand consists of values and a scale. FP8 values are stored as FP8, and transposed if the product sums over the
tensor's rows, because tensor cores need the summed dimension contiguous. NVFP4 values are stored as code x block
scale in bfloat16 in the tensor's own layout (see nvfp4.py), and only the global scale is left to the product. BF16 is
the tensor itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels import fused
from deskside.kernels.fused import Cast
from deskside.kernels.nvfp4.operand import Along
from deskside.precision import nvfp4
from deskside.precision.formats import DTYPE
from deskside.precision.nvfp4 import draw_signs
from deskside.utils import splitmix

PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class QuantizedOperand:
    """values times scale is the tensor. scale: None is 1, else float32: one number, or one per unsummed index.

    packed: NVFP4 as a native product reads it (`kernels.nvfp4.quantize.Packed`), whose codes are `values` then.
    """

    values: Tensor
    scale: Tensor | None = None
    transposed: bool = False
    packed: Any = None


class Draws:
    """Random numbers of a step: a pure function of (seed, step, index), so a resumed run repeats them."""

    def __init__(self, seed: int):
        self.seed = seed
        self.step = 0
        self._count = 0
        self._signs: dict[tuple[int, int], Tensor] = {}

    def begin(self, step: int) -> None:
        """Begin the draws of step number `step`."""
        self.step, self._count = step, 0
        self._signs.clear()

    def next(self) -> int:
        """Return a new seed, for the next tensor that is rounded stochastically."""
        self._count += 1
        return self._mix(self._count, 0)

    def signs(self, product: int, size: int, device: torch.device) -> Tensor:
        """Return random signs (size,), equal for both operands of a product and all micro-batches of a step."""
        key = (product, size)
        if key not in self._signs:
            generator = torch.Generator(device).manual_seed(self._mix(product, size))
            self._signs[key] = draw_signs(size, device, generator)
        return self._signs[key]

    def _mix(self, a: int, b: int) -> int:
        mixed = 0
        for part in (self.seed, self.step, a, b):
            mixed = splitmix.mix(mixed + part)
        return mixed & (2**31 - 1)


def quantize_operand(
    x_NK: Tensor, operand: Operand, along: Along, draws: Draws, product: int, fp4: bool = False
) -> QuantizedOperand:
    """x as the operand of a product that sums over its "columns" (K) or its "rows" (N).

    product: a number that both operands of the product share, for the signs of their transform. fp4: NVFP4 for a native
    product, else for an emulated one.
    """
    if operand.format in PLAIN:
        return QuantizedOperand(x_NK)
    if operand.format in DTYPE:
        return _fp8(x_NK, operand, along)
    signs = draws.signs(product, operand.hadamard, x_NK.device) if operand.fresh_signs else None
    seed = draws.next() if operand.rounding != "nearest" else 0
    if fp4 or x_NK.is_cuda:
        from deskside.kernels.nvfp4 import quantize as on_card

        if fp4:
            packed = on_card.quantize_packed(x_NK, operand, along, signs=signs, seed=seed)
            return QuantizedOperand(packed.codes, packed.global_scale, along == "rows", packed)
        result = on_card.quantize(x_NK, operand, along, signs=signs, seed=seed)
        return QuantizedOperand(result.values, result.global_scale)
    generator = torch.Generator(x_NK.device).manual_seed(seed)
    exact = nvfp4.quantize(x_NK, operand, along, signs=signs, generator=generator)
    return QuantizedOperand(exact.emulated, exact.global_scale)


def _fp8(x_NK: Tensor, operand: Operand, along: Along) -> QuantizedOperand:
    if operand.scaling == "row":
        both, of_rows, of_columns = cast_with_scales_of_rows(x_NK, DTYPE[operand.format])
    else:
        both, of_rows = cast_with_own_scale(x_NK, DTYPE[operand.format])
        of_columns = of_rows
    return (
        QuantizedOperand(both.rows, of_rows)
        if along == "columns"
        else QuantizedOperand(both.columns, of_columns, True)
    )


def cast_with_own_scale(
    x_NK: Tensor, dtype: torch.dtype, noted: Tensor | None = None
) -> tuple[fused.Fp8, Tensor]:
    """FP8 under one scale, from the largest value of this very tensor, and the scale's inverse.

    noted: one float32 number that becomes that value where it is less.
    """
    amax = largest(x_NK)
    scale, inverse = scale_of(amax, dtype)
    cast = Cast(dtype, scale, amax if noted is None else noted)
    return fused.cast_fp8(x_NK, cast), inverse


def cast_with_scales_of_rows(x_NK: Tensor, dtype: torch.dtype) -> tuple[fused.Fp8, Tensor, Tensor]:
    """FP8 with one scale per row, transposed with one per column; and the inverses of both."""
    (row_scale, of_rows), (column_scale, of_columns) = (scale_of(a, dtype) for a in fused.row_col_amax(x_NK))
    return fused.cast_both(x_NK, dtype, row_scale, column_scale), of_rows, of_columns


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, float32, in one pass. NaN if the tensor contains one."""
    return torch.linalg.vector_norm(x, float("inf")).float()


def scale_of(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(what values are multiplied with so that amax becomes the format's largest, its inverse). 1 where amax is 0.

    The scale is finite: infinity times the zeros beside a largest value of 1e-35 would be NaN. The inverse is not
    bounded away from zero: NaN and infinity must come out of the product as such.
    """
    # Every operation on these scalars is a kernel launch; `where` with a constant would cost another one.
    scale = (torch.finfo(dtype).max / amax).masked_fill_(amax == 0, 1.0)
    scale.clamp_(max=torch.finfo(torch.float32).max)  # NaN stays
    return scale, scale.reciprocal()
