"""The NVFP4 quantizer on a GPU: one pass finds the largest magnitude, a second writes the operand of a product.

The torch reference is precision/nvfp4.py. Without a Hadamard transform, values equal the reference bit for bit, given
the same noise. With one, the tensor cores sum in another order, so a few values in 100,000 round differently.

Memory traffic per BF16 value: 2 bytes are read for the maximum, then 2 are read and 2 written (0.56 if packed). The
maxima and scales stay on the device, so nothing synchronizes.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels.nvfp4.operand import (
    BLOCK,
    EDEN_OVERRIDE,
    Along,
    check_divisible,
    check_operand,
    check_signs,
    nvidia_signs,
)
from deskside.kernels.nvfp4.quantize_kernels import amax_kernel, quantize_kernel
from deskside.utils.errors import UsageError

PROGRAMS_PER_SM = 8
_nvidia_signs = cache(nvidia_signs)


@dataclass(frozen=True)
class Emulated:
    """An operand of an emulated product.

    values: (N, K) bfloat16, code x block scale, which is exact. global_scale: float32 scalar on the device.
    """

    values: Tensor
    global_scale: Tensor


@dataclass(frozen=True)
class Packed:
    """An operand of a native product, with the summed dimension S last. It is quantized from an (N, K) matrix.

    Along "columns", (M, S) = (N, K); along "rows", (M, S) = (K, N). codes: (M, S / 2) uint8, the even position in the
    low four bits. block_scale: (M, S / 16) E4M3. global_scale: float32 scalar on the device.
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor


def quantize(
    x_NK: Tensor,
    operand: Operand,
    along: Along,
    *,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    seed: int = 0,
    ends_E: Tensor | None = None,
) -> Emulated:
    """Quantize a contiguous (N, K) bfloat16 or float32 matrix on a GPU for an emulated product.

    along: the dimension that the product sums over.
    amax: float32 scalar, the largest magnitude after the transform, if known. It saves a pass; the caller must then
        detect NaN and infinity in x.
    signs: (hadamard,) of +-1 on the device; a transform of 16 without fresh signs uses NVIDIA's fixed vector.
    seed: 64 bits for stochastic rounding; use another seed for each tensor and step.
    ends_E: for rows sorted by expert, the first row after those of each expert, int32 multiples of 128, so that the
        rows of a tile are of one expert. Each expert is quantized separately; amax and the global scale are (E,).
    Raises UsageError for unsupported operands, shapes, dtypes and devices.
    """
    if amax is None:
        amax = transformed_amax(x_NK, operand, along, signs, ends_E)
    else:
        _check(x_NK, operand, along, signs)
    values = torch.empty_like(x_NK, dtype=torch.bfloat16)
    return Emulated(values, _launch(x_NK, operand, along, amax, signs, seed, (values, None), ends_E))


def quantize_packed(
    x_NK: Tensor, operand: Operand, along: Along, *, signs: Tensor | None = None, seed: int = 0
) -> Packed:
    """Quantize for a native product, with the arguments of `quantize` except `amax`.

    Along "rows" the output is transposed.
    """
    amax = transformed_amax(x_NK, operand, along, signs)
    M, S = x_NK.shape if along == "columns" else x_NK.T.shape
    codes = torch.empty(M, S // 2, dtype=torch.uint8, device=x_NK.device)
    block_scale = torch.empty(M, S // BLOCK, dtype=torch.uint8, device=x_NK.device)
    global_scale = _launch(x_NK, operand, along, amax, signs, seed, (codes, block_scale))
    return Packed(codes, block_scale.view(torch.float8_e4m3fn), global_scale)


def transformed_amax(
    x_NK: Tensor,
    operand: Operand,
    along: Along,
    signs: Tensor | None = None,
    ends_E: Tensor | None = None,
) -> Tensor:
    """Return the largest magnitude of the transformed matrix, a float32 scalar on the device. NaN if x contains NaN.

    ends_E: as for `quantize`; the result is (E,).
    """
    _check(x_NK, operand, along, signs)
    bits = torch.zeros(() if ends_E is None else len(ends_E), dtype=torch.int32, device=x_NK.device)
    tile = _tile(operand.hadamard, along)
    count, programs = _tiles(x_NK, tile)
    amax_kernel[(programs,)](
        x_NK, *_transform(x_NK, operand, signs), bits, bits if ends_E is None else ends_E, *x_NK.shape, count,
        **_experts(ends_E), **tile, INTERPRETED=_interpreted(), **_options(operand.hadamard),
    )  # fmt: skip
    return bits.view(torch.float32)


def _launch(
    x_NK: Tensor,
    operand: Operand,
    along: Along,
    amax: Tensor,
    signs: Tensor | None,
    seed: int,
    outputs: tuple[Tensor, Tensor | None],
    ends_E: Tensor | None = None,
) -> Tensor:
    """Write emulated values to the first of `outputs`, or codes to it and block scales to the second one.

    Returns the global scale.
    """
    out, block_scale = outputs
    global_scale = torch.empty_like(amax)
    tile = _tile(operand.hadamard, along)
    count, programs = _tiles(x_NK, tile)
    quantize_kernel[(programs,)](
        x_NK, *_transform(x_NK, operand, signs), amax, amax if ends_E is None else ends_E,
        out, out if block_scale is None else block_scale, global_scale,
        *x_NK.shape, count, (seed + 2**63) % 2**64 - 2**63,  # the same 64 bits as a signed number
        **_experts(ends_E), **_constants(operand, packed=block_scale is not None),
        **tile, INTERPRETED=_interpreted(), **_options(operand.hadamard),
    )  # fmt: skip
    return global_scale


def _experts(ends_E: Tensor | None) -> dict[str, int]:
    """Return the kernels' number of experts, or 0, and the same rounded up to a power of two."""
    experts = 0 if ends_E is None else len(ends_E)
    return {"EXPERTS": experts, "BLOCK_E": int(triton.next_power_of_2(max(experts, 1)))}


def _tile(hadamard: int, along: Along) -> dict[str, Any]:
    """Return the kernels' tile sizes. BS, along the summed dimension, is a multiple of the transform's size.

    A tile has 32 values per thread; more would not fit into registers.
    """
    summed = {0: 128 if along == "columns" else 64, 16: 64, 128: 128}[hadamard]
    tile_values = 8192 if hadamard else 4096
    return {"HADAMARD": hadamard, "ROWS": along == "rows", "BM": tile_values // summed, "BS": summed}


def _options(hadamard: int) -> dict[str, Any]:
    # A fused multiply-add rounds once instead of twice, so values would differ from the reference.
    return {"num_warps": 8 if hadamard else 4, "enable_fp_fusion": False}


def _constants(operand: Operand, packed: bool) -> dict[str, Any]:
    eden = operand.rounding == "eden"
    largest_code = 6.0 / EDEN_OVERRIDE if eden else 6.0
    return {
        "TOP_INVERSE": 1 / largest_code,
        "RANGE": largest_code * (256.0 if eden or operand.four_over_six else 448.0),
        "A": 16 if operand.scaling == "16x16" else 1,
        "ROUNDING": operand.rounding,
        "FOUR_OVER_SIX": operand.four_over_six,
        "SCALE_UP": operand.scale_up,
        "PACKED": packed,
    }


def _tiles(x_NK: Tensor, tile: dict[str, Any]) -> tuple[int, int]:
    """Return the number of tiles of the matrix, and the number of programs that loop over them."""
    M, S = reversed(x_NK.shape) if tile["ROWS"] else x_NK.shape
    count = int(triton.cdiv(M, tile["BM"]) * triton.cdiv(S, tile["BS"]))
    return count, max(1, min(count, _multiprocessors(x_NK.device) * PROGRAMS_PER_SM))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def _transform(x_NK: Tensor, operand: Operand, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the Hadamard matrix and the signs for the kernels, which do not read them without a transform."""
    if not operand.hadamard:
        return x_NK, x_NK
    dtype = torch.float32 if _interpreted() else x_NK.dtype
    matrix = _hadamard_matrix(operand.hadamard, dtype, x_NK.device)
    return matrix, _nvidia_signs(x_NK.device) if signs is None else signs


@cache
def _hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix of +-1; for size 16, a block-diagonal matrix of four copies."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return (torch.block_diag(*[matrix] * 4) if size == 16 else matrix).to(device, dtype)


def _check(x_NK: Tensor, operand: Operand, along: Along, signs: Tensor | None) -> None:
    if x_NK.device.type != "cuda" and not _interpreted():
        raise UsageError(
            f"the NVFP4 kernels need a CUDA tensor, this is on {x_NK.device}; use the reference in precision/nvfp4.py"
        )
    if x_NK.dim() != 2 or not x_NK.is_contiguous() or x_NK.dtype not in (torch.bfloat16, torch.float32):
        raise UsageError(
            "the NVFP4 quantizer takes a contiguous matrix in bfloat16 or float32; "
            f"this is {tuple(x_NK.shape)} {x_NK.dtype} with strides {x_NK.stride()}"
        )
    check_operand(operand)
    check_divisible("the operand", (x_NK.shape[0], x_NK.shape[1]), operand, along)
    check_signs(operand, signs, x_NK.device)
