"""Block-scaled products on the tensor cores of compute capability 10.x and 12.x.

These kernels have been compiled for such cards and their instructions inspected (tests/kernels/test_cross_compile.py),
but this project has never run them on one. A self-check on the card itself decides whether they are used.

`nvfp4_matmul` multiplies packed E2M1 codes with E4M3 block scales in one scaled instruction: on 12.x mma.sync
kind::mxf4nvf4.block_scale, on 10.x tcgen05.mma of the same kind. `fp8_matmul` is an FP8 product with one scale per
tensor. On 12.x it runs as MXFP8 with all block scales 1, because GeForce cards run the plain FP8 instruction with
float32 accumulation at half the rate of the scaled one (OneTrainer pull request 1686, PyTorch issue 198126). On 10.x
the plain instruction is not slower, so `fp8_matmul` does not support it.

Both products sum over the last dimension of both operands: out (L, R) = left (L, S) right (R, S)^T.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.nvfp4.matmul import TL_DTYPE, one_on, tile_origin
from deskside.kernels.nvfp4.quantize import Packed
from deskside.utils.errors import UsageError

# 3 stages of 128 x 128 tiles, each 2 x 8 KB of codes and 2 x 1 KB of scales, or 2 x 16 KB of FP8, fit into 99 KB.
TILE: dict[str, Any] = {"BL": 128, "BR": 128, "BS": 128, "GROUP": 8}
OPTIONS = {"num_warps": 8, "num_stages": 3}
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@triton.jit
def nvfp4_kernel(  # type: ignore[no-untyped-def]
    left, left_scale, right, right_scale, out, scale_a_ptr, scale_b_ptr, L, R, S, pairs, blocks,
    BL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute one tile per program. A row has pairs = S / 2 bytes of codes and blocks = S / 16 scales.

    These are separate arguments, because Triton specializes each integer argument on its divisibility by 16, and then
    loads several values at once.
    """
    i0, j0 = tile_origin(tl.program_id(0), L, R, BL, BR, GROUP)
    i = i0 + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    pair = tl.arange(0, BS // 2)
    block = tl.arange(0, BS // 16)
    i_read = (i % L).to(tl.int64)
    j_read = (j % R).to(tl.int64)
    a_ptrs = left + i_read[:, None] * pairs + pair[None, :]
    b_ptrs = right + j_read[None, :] * pairs + pair[:, None]
    a_scale_ptrs = left_scale + i_read[:, None] * blocks + block[None, :]
    b_scale_ptrs = right_scale + j_read[:, None] * blocks + block[None, :]
    acc = tl.zeros((BL, BR), tl.float32)
    for s in range(0, S, BS):
        if EVEN:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
            a_scale = tl.load(a_scale_ptrs)
            b_scale = tl.load(b_scale_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(s // 2 + pair < pairs)[None, :], other=0)
            b = tl.load(b_ptrs, mask=(s // 2 + pair < pairs)[:, None], other=0)
            a_scale = tl.load(a_scale_ptrs, mask=(s // 16 + block < blocks)[None, :], other=0.0)
            b_scale = tl.load(b_scale_ptrs, mask=(s // 16 + block < blocks)[None, :], other=0.0)
        acc = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)
        a_ptrs += BS // 2
        b_ptrs += BS // 2
        a_scale_ptrs += BS // 16
        b_scale_ptrs += BS // 16
    result = (acc * (tl.load(scale_a_ptr) * tl.load(scale_b_ptr))).to(DTYPE)
    tl.store(out + i[:, None].to(tl.int64) * R + j[None, :], result, mask=(i < L)[:, None] & (j < R)[None, :])


@triton.jit
def fp8_kernel(  # type: ignore[no-untyped-def]
    left, right, out, scale_a_ptr, scale_b_ptr, L, R, S,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute one tile per program. LEFT, RIGHT: "e4m3" or "e5m2"."""
    i0, j0 = tile_origin(tl.program_id(0), L, R, BL, BR, GROUP)
    i = i0 + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    s = tl.arange(0, BS)
    a_ptrs = left + (i % L).to(tl.int64)[:, None] * S + s[None, :]
    b_ptrs = right + (j % R).to(tl.int64)[None, :] * S + s[:, None]
    a_ones = tl.full((BL, BS // 32), 127, tl.uint8)  # E8M0: 2 ** (127 - 127)
    b_ones = tl.full((BR, BS // 32), 127, tl.uint8)
    acc = tl.zeros((BL, BR), tl.float32)
    for start in range(0, S, BS):
        if EVEN:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(start + s < S)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(start + s < S)[:, None], other=0.0)
        acc = tl.dot_scaled(a, a_ones, LEFT, b, b_ones, RIGHT, acc)
        a_ptrs += BS
        b_ptrs += BS
    result = (acc * (tl.load(scale_a_ptr) * tl.load(scale_b_ptr))).to(DTYPE)
    tl.store(out + i[:, None].to(tl.int64) * R + j[None, :], result, mask=(i < L)[:, None] & (j < R)[None, :])


def nvfp4_matmul(left: Packed, right: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiply packed operands (L, S) and (R, S)^T, with both global scales: (L, R) bfloat16 or float32.

    Raises UsageError on a card without the instruction, or if S differs or is not divisible by 32.
    """
    _check_card(left.codes, (10, 12))
    L, R, S = left.codes.shape[0], right.codes.shape[0], 2 * left.codes.shape[1]
    if right.codes.shape[1] != left.codes.shape[1] or S % 32:
        raise UsageError(
            f"nvfp4_matmul sums over {S} and {2 * right.codes.shape[1]} values; both must be equal and divisible by 32"
        )
    return _launch(
        nvfp4_kernel, (left.codes, left.block_scale, right.codes, right.block_scale), (L, R), dtype,
        (left.global_scale, right.global_scale, L, R, S, S // 2, S // 16), EVEN=S % TILE["BS"] == 0,
    )  # fmt: skip


def fp8_matmul(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    *,
    scale_b: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return scale_a x scale_b x left (L, S) right (R, S)^T, (L, R) bfloat16 or float32. Each operand is E4M3 or E5M2.

    scale_a, scale_b: one float32 number each, on the device, the scales of left and right; None is 1. Raises UsageError
    like `nvfp4_matmul`.
    """
    _check_card(left, (12,))
    for name, matrix in (("left", left), ("right", right)):
        if matrix.dtype not in _FP8 or matrix.dim() != 2 or not matrix.is_contiguous():
            raise UsageError(
                f"fp8_matmul's {name} operand must be a contiguous FP8 matrix, not {matrix.dtype}"
            )
    if left.shape[1] != right.shape[1] or left.shape[1] % 32:
        raise UsageError(
            f"fp8_matmul sums over {left.shape[1]} and {right.shape[1]}; both must be equal and divisible by 32"
        )
    L, R, S = left.shape[0], right.shape[0], left.shape[1]
    scale_b = one_on(left.device) if scale_b is None else scale_b
    return _launch(
        fp8_kernel, (left, right), (L, R), dtype,
        (scale_a, scale_b, L, R, S), LEFT=_FP8[left.dtype], RIGHT=_FP8[right.dtype], EVEN=S % TILE["BS"] == 0,
    )  # fmt: skip


def _launch(
    kernel: Any,
    operands: tuple[Tensor, ...],
    shape: tuple[int, int],
    dtype: torch.dtype,
    scalars: tuple[Tensor | int, ...],
    **constants: Any,
) -> Tensor:
    """Launch kernel(*operands, out, *scalars) with one program per tile. Returns out, of `shape` and `dtype`."""
    if dtype not in TL_DTYPE:
        raise UsageError(f"block-scaled products give bfloat16 or float32, not {dtype}")
    out = torch.empty(shape, dtype=dtype, device=operands[0].device)
    tiles = triton.cdiv(shape[0], TILE["BL"]) * triton.cdiv(shape[1], TILE["BR"])
    kernel[(tiles,)](*operands, out, *scalars, **TILE, DTYPE=TL_DTYPE[dtype], **constants, **OPTIONS)
    return out


def _check_card(matrix: Tensor, majors: tuple[int, ...]) -> None:
    if matrix.device.type != "cuda" or torch.cuda.get_device_capability(matrix.device)[0] not in majors:
        wanted = " or ".join(f"{major}.x" for major in majors)
        raise UsageError(
            f"this block-scaled product needs compute capability {wanted}, which {matrix.device} does not have; "
            "use the emulated or the plain FP8 product"
        )
