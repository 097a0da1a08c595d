"""The three products of a linear layer, on operands in any format.

Native: FP8 operands go to the tensor cores through torch._scaled_mm, or as MXFP8 with unit scales where that is faster
(hardware_caps.py), and packed NVFP4 through a Triton kernel. Emulated: FP8 codes are exact in bfloat16, as
NVFP4's code x block scale is, so that an ordinary bfloat16 product with float32 sums and the scales in its epilogue
gives the same numbers, up to the order of sums, on any card and on a CPU.
"""

from typing import Literal

import torch
from torch import Tensor

from deskside.precision.quantized_operand import QuantizedOperand

Kind = Literal["output", "input_gradient", "weight_gradient"]


LAYOUTS: dict[Kind, Literal["nt", "nn", "tn"]] = {
    "output": "nt",
    "input_gradient": "nn",
    "weight_gradient": "tn",
}


def product(
    kind: Kind,
    left: QuantizedOperand,
    right: QuantizedOperand,
    dtype: torch.dtype,
    native: bool,
    mxfp8: bool = False,
) -> Tensor:
    """output: (N, K) x (M, K) -> (N, M). input_gradient: (N, M) x (M, K) -> (N, K). weight_gradient: (N, M) x (N, K)
    -> (M, K). The shapes are the tensors' own; one that is stored transposed has the summed dimension last.
    dtype: of the result. mxfp8: issue FP8 as MXFP8 with unit scales."""
    if left.packed is not None:
        from deskside.kernels.nvfp4.native import nvfp4_matmul

        return nvfp4_matmul(left.packed, right.packed, dtype)
    if native and left.values.dtype.itemsize == 1:
        # Block-scaled FP8 has 32 values to a block; a sum of another length is left to the plain product.
        if (
            mxfp8
            and (left.scale is not None and left.scale.ndim == 0)
            and (left.values.shape[1] % 32 == 0 and right.values.is_contiguous())
        ):
            from deskside.kernels.nvfp4.native import fp8_matmul

            return fp8_matmul(left.values, right.values, left.scale, scale_b=right.scale, dtype=dtype)
        return _native(kind, left, right, dtype)
    a, b = _wide(left.values), _wide(right.values)
    # Operands that are stored transposed for tensor cores are so on both sides where both are summed over rows.
    layout = "nt" if right.transposed else LAYOUTS[kind]
    if left.scale is not None and right.scale is not None:
        return _with_scales(a, b, layout, left.scale, right.scale, dtype)
    return _plain(*_oriented(a, b, layout), dtype)


def _native(kind: Kind, left: QuantizedOperand, right: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """Gradients are summed in full float32: the faster accumulation of Hopper's tensor cores keeps about 14 bits, which
    is felt over the 65,536 tokens of a weight gradient. The output's sums are short; there it saves 3 to 8 %."""
    a, b = left.scale, right.scale
    assert a is not None and b is not None
    fast = kind == "output"
    if a.ndim:
        # Scales per row are computed with a bfloat16 result only.
        scaled = torch._scaled_mm(
            left.values, right.values.T, a[:, None], b[None, :], out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return scaled.to(dtype)
    return torch._scaled_mm(left.values, right.values.T, a, b, out_dtype=dtype, use_fast_accum=fast)


def _wide(values: Tensor) -> Tensor:
    """FP8 codes as bfloat16, exactly; anything else as it is."""
    return values.to(torch.bfloat16) if values.dtype.itemsize == 1 else values


def _oriented(a: Tensor, b: Tensor, layout: Literal["nt", "nn", "tn"]) -> tuple[Tensor, Tensor]:
    return (a.T if layout == "tn" else a), (b.T if layout == "nt" else b)


def _plain(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _with_scales(
    a: Tensor, b: Tensor, layout: Literal["nt", "nn", "tn"], left: Tensor, right: Tensor, dtype: torch.dtype
) -> Tensor:
    if left.ndim == 0 and a.is_cuda:
        from deskside.kernels.nvfp4.matmul import scaled_matmul

        return scaled_matmul(a, b, left, layout, scale_b=right, dtype=dtype)
    a, b = _oriented(a, b, layout)
    # Both are exact in bfloat16, so that on a card its product with a float32 result is the same, and faster.
    total = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
    return total.mul_(left if left.ndim == 0 else left[:, None]).mul_(right).to(dtype)
