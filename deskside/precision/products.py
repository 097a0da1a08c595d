"""The three products of a linear layer, on operands in any format.

Native: torch._scaled_mm multiplies FP8 operands on the tensor cores, or a Triton kernel does so as MXFP8 with unit
scales if that is faster (hardware_caps.py). Another Triton kernel multiplies packed NVFP4. Emulated: FP8 values, and
code x block scale of NVFP4, are exact in bfloat16. An ordinary bfloat16 product with float32 sums and the scales in its
epilogue gives the same numbers, up to the order of sums, on any GPU and on a CPU.
"""

from typing import Literal

import torch
from torch import Tensor

from deskside.kernels.quack_matmul import MatmulTile, matmul
from deskside.precision.quantized_operand import QuantizedOperand

Kind = Literal["output", "input_gradient", "weight_gradient"]
# As in BLAS, one letter for the left and one for the right operand: transposed ("t") or not ("n")
Layout = Literal["nt", "nn", "tn"]

LAYOUTS: dict[Kind, Layout] = {
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
    tile: MatmulTile | None = None,
) -> Tensor:
    """Multiply two operands and return the result in `dtype`.

    output: (N, K) x (M, K) -> (N, M). input_gradient: (N, M) x (M, K) -> (N, K). weight_gradient: (N, M) x (N, K)
    -> (M, K). An operand that is stored transposed has the summed dimension last instead.
    native: compute FP8 on tensor cores. mxfp8: run native FP8 products as MXFP8 with unit scales where possible.
    tile: compute an unquantized product of one dtype with quack-kernels; None: with torch.
    """
    if left.packed is not None:
        from deskside.kernels.nvfp4.native import nvfp4_matmul

        return nvfp4_matmul(left.packed, right.packed, dtype)
    if native and left.values.dtype.itemsize == 1:
        whole_blocks = left.values.shape[1] % 32 == 0  # an MXFP8 block has 32 values
        scale = left.scale
        if mxfp8 and scale is not None and scale.ndim == 0 and whole_blocks and right.values.is_contiguous():
            from deskside.kernels.nvfp4.native import fp8_matmul

            return fp8_matmul(left.values, right.values, scale, scale_b=right.scale, dtype=dtype)
        return _native(kind, left, right, dtype)
    a, b = _fp8_to_bf16(left.values), _fp8_to_bf16(right.values)
    # Both summed dimensions are last if the right operand is stored transposed: then the left one is either stored
    # transposed too ("weight_gradient") or has the summed dimension last anyway ("input_gradient").
    layout = "nt" if right.transposed else LAYOUTS[kind]
    if left.scale is not None and right.scale is not None:
        return _scaled_bf16_product(a, b, layout, left.scale, right.scale, dtype)
    a, b = _transpose(a, b, layout)
    return matmul(a, b, tile) if tile is not None and a.dtype == dtype else _matmul(a, b, dtype)


def _native(kind: Kind, left: QuantizedOperand, right: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """Multiply FP8 operands with torch._scaled_mm.

    Hopper's fast accumulation keeps about 14 bits. This is too few for a weight gradient, which sums over up to 65,536
    tokens, so gradients are summed in full float32. For the short sums of the output, it saves 3 to 8 % of the time.
    """
    left_scale, right_scale = left.scale, right.scale
    assert left_scale is not None and right_scale is not None
    fast = kind == "output"
    if left_scale.ndim == 0:
        return torch._scaled_mm(
            left.values, right.values.T, left_scale, right_scale, out_dtype=dtype, use_fast_accum=fast
        )
    # With one scale per row, _scaled_mm supports bfloat16 results only.
    result = torch._scaled_mm(
        left.values,
        right.values.T,
        left_scale[:, None],
        right_scale[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return result.to(dtype)


def _fp8_to_bf16(values: Tensor) -> Tensor:
    """Return FP8 values in bfloat16, which is exact, and any other tensor unchanged."""
    return values.to(torch.bfloat16) if values.dtype.itemsize == 1 else values


def _transpose(a: Tensor, b: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    return (a.T if layout == "tn" else a), (b.T if layout == "nt" else b)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def _scaled_bf16_product(
    a: Tensor, b: Tensor, layout: Layout, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    if left_scale.ndim == 0 and a.is_cuda:
        from deskside.kernels.nvfp4.matmul import scaled_matmul

        return scaled_matmul(a, b, left_scale, layout, scale_b=right_scale, dtype=dtype)
    a, b = _transpose(a, b, layout)
    # a and b are bfloat16. A CPU cannot return their product in float32, so they are converted first.
    total = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
    return total.mul_(left_scale if left_scale.ndim == 0 else left_scale[:, None]).mul_(right_scale).to(dtype)
