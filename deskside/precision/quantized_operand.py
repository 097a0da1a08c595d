"""Quantization of tensors into operands of a product, in the formats of a recipe.

An operand consists of values and a scale. FP8 values are stored as FP8, and transposed if the product sums over the
tensor's rows, because tensor cores need a contiguous summed dimension. For an emulated product, NVFP4 values are stored
as code x block scale in bfloat16 without transposing (see nvfp4.py), and the product applies only the global scale. An
unquantized operand is the tensor itself.
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

UNQUANTIZED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class QuantizedOperand:
    """An operand that represents the tensor values x scale.

    scale: float32, a scalar or one number per index of the dimension that is not summed. None means 1. Operands of
        experts have one number per expert (NVFP4), per row, or per expert and index: `sorted_operand`.
    transposed: the values are stored transposed.
    packed: NVFP4 in the form that native products read (`kernels.nvfp4.quantize.Packed`). `values` and `scale` are then
        its codes and its global scale.
    """

    values: Tensor
    scale: Tensor | None = None
    transposed: bool = False
    packed: Any = None


class Draws:
    """Random numbers of a step, a pure function of (seed, step, index), so that a resumed run repeats them."""

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
        """Return a new 31-bit seed."""
        self._count += 1
        return self._mix(self._count, 0)

    def signs(self, product: int, size: int, device: torch.device) -> Tensor:
        """Return random signs (size,), the same for both operands of a product and for all micro-batches of a step."""
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
    """Quantize x into an operand of a product that sums over its "columns" (K) or its "rows" (N).

    product: the number of the product, so that both of its operands get the same random signs. fp4: quantize NVFP4 for
    a native product; otherwise for an emulated one.
    """
    if operand.format in UNQUANTIZED:
        return QuantizedOperand(x_NK)
    if operand.format in DTYPE:
        return _fp8(x_NK, operand, along)
    signs = draws.signs(product, operand.hadamard, x_NK.device) if operand.fresh_signs else None
    seed = draws.next() if operand.rounding != "nearest" else 0
    if fp4 or x_NK.is_cuda:
        from deskside.kernels.nvfp4 import quantize as triton_nvfp4

        if fp4:
            packed = triton_nvfp4.quantize_packed(x_NK, operand, along, signs=signs, seed=seed)
            return QuantizedOperand(packed.codes, packed.global_scale, along == "rows", packed)
        emulated = triton_nvfp4.quantize(x_NK, operand, along, signs=signs, seed=seed)
        return QuantizedOperand(emulated.values, emulated.global_scale)
    generator = torch.Generator(x_NK.device).manual_seed(seed)
    quantized = nvfp4.quantize(x_NK, operand, along, signs=signs, generator=generator)
    return QuantizedOperand(quantized.emulated, quantized.global_scale)


def _fp8(x_NK: Tensor, operand: Operand, along: Along) -> QuantizedOperand:
    if operand.scaling == "row":
        fp8, row_inverse, column_inverse = cast_rowwise(x_NK, DTYPE[operand.format])
    else:
        fp8, row_inverse = cast_with_current_scale(x_NK, DTYPE[operand.format])
        column_inverse = row_inverse
    if along == "columns":
        return QuantizedOperand(fp8.rows, row_inverse)
    return QuantizedOperand(fp8.columns, column_inverse, transposed=True)


def cast_with_current_scale(
    x_NK: Tensor, dtype: torch.dtype, amax_out: Tensor | None = None
) -> tuple[fused.Fp8, Tensor]:
    """Cast to FP8 with one scale, computed from the largest magnitude of this tensor. Returns the inverse scale too.

    amax_out: float32 scalar that is raised to this magnitude if it is smaller.
    """
    amax = largest_magnitude(x_NK)
    scale, inverse = scale_and_inverse(amax, dtype)
    cast = Cast(dtype, scale, amax if amax_out is None else amax_out)
    return fused.cast_fp8(x_NK, cast), inverse


def cast_rowwise(x_NK: Tensor, dtype: torch.dtype) -> tuple[fused.Fp8, Tensor, Tensor]:
    """Cast to FP8 with one scale per row, and transposed with one scale per column.

    Also returns the inverse scales of the rows (N,) and of the columns (K,).
    """
    row_amax, column_amax = fused.row_col_amax(x_NK)
    row_scale, row_inverse = scale_and_inverse(row_amax, dtype)
    column_scale, column_inverse = scale_and_inverse(column_amax, dtype)
    return fused.cast_both(x_NK, dtype, row_scale, column_scale), row_inverse, column_inverse


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude as a float32 scalar, in one pass. NaN if the tensor contains NaN."""
    return torch.linalg.vector_norm(x, float("inf")).float()


def scale_and_inverse(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scale that maps amax to the largest value of an FP8 format, and its inverse. Both are 1 if amax is 0.

    The scale of a tiny amax is clamped to finite values, because zeros times an infinite scale would be NaN.
    The inverse is not clamped, so that NaN and infinity in the tensor appear in the result of the product.
    """
    # Each operation on these scalars is a kernel launch; `torch.where` with a constant would need one more.
    scale = (torch.finfo(dtype).max / amax).masked_fill_(amax == 0, 1.0)
    scale.clamp_(max=torch.finfo(torch.float32).max)  # NaN stays
    return scale, scale.reciprocal()
