"""The three products of the experts' layers, on operands in any format, for rows sorted by expert.

Native: torch._scaled_grouped_mm multiplies E4M3 operands with a scale per row on tensor cores of compute capability 9.0
and, if torch was built for them, 10.x. It takes no other scaling, returns bfloat16, and needs multiples of 16 in every
dimension, the rows of each expert included. Emulated: a grouped product in bfloat16. FP8 values times their scales,
which are powers of two, are exact in bfloat16; code x block scale of NVFP4 is too, and its global scales multiply the
result.

Suffixes: see `sorted_operand`.
"""

import torch
from torch import Tensor

from deskside.kernels import moe
from deskside.kernels.moe.fp8_rows import experts_of_rows
from deskside.precision.products import Kind
from deskside.precision.quantized_operand import QuantizedOperand


def grouped_product(
    kind: Kind,
    left: QuantizedOperand,
    right: QuantizedOperand,
    ends_E: Tensor,
    dtype: torch.dtype,
    native: bool,
) -> Tensor:
    """Multiply the operands of each expert and return the results in `dtype`. Native results are rounded to bfloat16.

    output: rows (S, K) x weights (E, M, K) -> (S, M). input_gradient: (S, M) x (E, M, K) -> (S, K). weight_gradient:
    (S, M) x (S, K) -> (E, M, K). Operands have the forms of `sorted_operand`. native: compute FP8 on tensor cores.
    """
    if left.values.dtype.itemsize == 1:
        return (_native_fp8 if native else _emulated_fp8)(kind, left, right, ends_E, dtype)
    if kind == "weight_gradient":
        gradient = moe.grouped_weight_gradient(left.values, right.values, ends_E, dtype)
        return gradient if left.scale is None else gradient.mul_(_scale(left, right)[:, None, None])
    result = moe.grouped_matmul(left.values, right.values, ends_E, transpose=kind == "output")
    if left.scale is not None:
        result.mul_(_scale(left, right)[experts_of_rows(ends_E, len(result)), None])
    return result.to(dtype)


def _scale(left: QuantizedOperand, right: QuantizedOperand) -> Tensor:
    """Return the product of the global scales of both operands, (E,)."""
    assert left.scale is not None and right.scale is not None
    return left.scale * right.scale


def _native_fp8(
    kind: Kind, left: QuantizedOperand, right: QuantizedOperand, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    assert left.scale is not None and right.scale is not None
    scales = left.scale, right.scale
    if kind == "weight_gradient":
        # (M, S) x (S, K): torch expects a scale for every row and every column of each expert's result.
        scales = (
            left.scale.repeat_interleave(len(left.values)),
            right.scale.repeat_interleave(len(right.values)),
        )
    result = torch._scaled_grouped_mm(
        left.values,
        right.values.transpose(-2, -1),
        *scales,
        offs=ends_E,
        out_dtype=torch.bfloat16,
        # Sums over the columns of a weight, not over rows, are short enough for Hopper's 14 bits (products.py).
        use_fast_accum=kind != "weight_gradient",
    )
    return result.to(dtype)


def _emulated_fp8(
    kind: Kind, left: QuantizedOperand, right: QuantizedOperand, ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    assert left.scale is not None and right.scale is not None
    if kind == "weight_gradient":
        experts_S = experts_of_rows(ends_E, left.values.shape[1])
        g_SM, x_SK = (
            _bfloat16(operand.values.T, scale[experts_S, None])
            for operand, scale in ((left, left.scale), (right, right.scale))
        )
        return moe.grouped_weight_gradient(g_SM, x_SK, ends_E, dtype)
    rows = _bfloat16(left.values, left.scale[:, None])
    return moe.grouped_matmul(rows, _bfloat16(right.values, right.scale[..., None]), ends_E, True).to(dtype)


def _bfloat16(values: Tensor, scale: Tensor) -> Tensor:
    """Return FP8 values times powers of two, which is exact in bfloat16, as a contiguous tensor."""
    return (values.to(torch.bfloat16) * scale.to(torch.bfloat16)).contiguous()
