"""Block-scaled products on the tensor cores of compute capability 10.x and 12.x.

Compiled for them and the instructions inspected (tests/kernels/test_cross_compile.py); never run on such a card by
us. The self-check decides on the card itself whether these are used.

`nvfp4_matmul` reads packed E2M1 codes and E4M3 block scales and issues one scaled instruction for them: on 12.x
mma.sync kind::mxf4nvf4.block_scale, on 10.x tcgen05.mma of the same kind. `fp8_matmul` is the plain FP8 product of
tensorwise scaling, issued on 12.x as MXFP8 whose block scales are all one: GeForce cards run the plain FP8 instruction
with float32 sums at half the rate of the scaled one (OneTrainer pull request 1686, PyTorch issue 198126). On 10.x the
plain one is not slower.

Both sum over the last dimension of both operands: out (L, R) = left (L, S) right (R, S)^T.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.nvfp4.matmul import TL_DTYPE, corner, one
from deskside.kernels.nvfp4.quantize import Packed
from deskside.utils.errors import UsageError

# 3 stages of 128 x 128 tiles: 2 x 8 KB of codes and 2 x 1 KB of scales, or 2 x 16 KB of FP8, within 99 KB.
TILE: dict[str, Any] = {"BL": 128, "BR": 128, "BS": 128, "GROUP": 8}
OPTIONS = {"num_warps": 8, "num_stages": 3}
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@triton.jit
def nvfp4_kernel(  # type: ignore[no-untyped-def]
    left, left_scale, right, right_scale, out, alpha_ptr, second_ptr, L, R, S, pairs, blocks,
    BL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile a program. pairs = S / 2 bytes and blocks = S / 16 scales a row: arguments of their own, so that the
    compiler knows where each is divisible by 16 and loads many at once."""
    i0, j0 = corner(tl.program_id(0), L, R, BL, BR, GROUP)
    i = i0 + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    pair = tl.arange(0, BS // 2)
    block = tl.arange(0, BS // 16)
    i_read = (i % L).to(tl.int64)
    j_read = (j % R).to(tl.int64)
    a_at = left + i_read[:, None] * pairs + pair[None, :]
    b_at = right + j_read[None, :] * pairs + pair[:, None]
    a_scale_at = left_scale + i_read[:, None] * blocks + block[None, :]
    b_scale_at = right_scale + j_read[:, None] * blocks + block[None, :]
    total = tl.zeros((BL, BR), tl.float32)
    for s in range(0, S, BS):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
            a_scale = tl.load(a_scale_at)
            b_scale = tl.load(b_scale_at)
        else:
            a = tl.load(a_at, mask=(s // 2 + pair < pairs)[None, :], other=0)
            b = tl.load(b_at, mask=(s // 2 + pair < pairs)[:, None], other=0)
            a_scale = tl.load(a_scale_at, mask=(s // 16 + block < blocks)[None, :], other=0.0)
            b_scale = tl.load(b_scale_at, mask=(s // 16 + block < blocks)[None, :], other=0.0)
        total = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", total)
        a_at += BS // 2
        b_at += BS // 2
        a_scale_at += BS // 16
        b_scale_at += BS // 16
    result = (total * (tl.load(alpha_ptr) * tl.load(second_ptr))).to(DTYPE)
    tl.store(out + i[:, None].to(tl.int64) * R + j[None, :], result, mask=(i < L)[:, None] & (j < R)[None, :])


@triton.jit
def fp8_kernel(  # type: ignore[no-untyped-def]
    left, right, out, alpha_ptr, second_ptr, L, R, S,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile a program. LEFT, RIGHT: "e4m3" or "e5m2"."""
    i0, j0 = corner(tl.program_id(0), L, R, BL, BR, GROUP)
    i = i0 + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    s = tl.arange(0, BS)
    a_at = left + (i % L).to(tl.int64)[:, None] * S + s[None, :]
    b_at = right + (j % R).to(tl.int64)[None, :] * S + s[:, None]
    a_ones = tl.full((BL, BS // 32), 127, tl.uint8)  # E8M0: 2 ** (127 - 127)
    b_ones = tl.full((BR, BS // 32), 127, tl.uint8)
    total = tl.zeros((BL, BR), tl.float32)
    for start in range(0, S, BS):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(start + s < S)[None, :], other=0.0)
            b = tl.load(b_at, mask=(start + s < S)[:, None], other=0.0)
        total = tl.dot_scaled(a, a_ones, LEFT, b, b_ones, RIGHT, total)
        a_at += BS
        b_at += BS
    result = (total * (tl.load(alpha_ptr) * tl.load(second_ptr))).to(DTYPE)
    tl.store(out + i[:, None].to(tl.int64) * R + j[None, :], result, mask=(i < L)[:, None] & (j < R)[None, :])


def nvfp4_matmul(left: Packed, right: Packed, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(L, S) x (R, S)^T of packed operands, both global scales applied: (L, R) bfloat16 or float32.

    Raises UsageError on a card without the instruction and for shapes that do not fit.
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
    alpha: Tensor,
    *,
    second: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """alpha x second x left (L, S) right (R, S)^T of E4M3 or E5M2 matrices, each kind: (L, R) bfloat16 or float32.

    alpha, second: float32, one number on the device: the scales of the operands. Raises UsageError as above.
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
    second = one(left.device) if second is None else second
    return _launch(
        fp8_kernel, (left, right), (L, R), dtype,
        (alpha, second, L, R, S), LEFT=_FP8[left.dtype], RIGHT=_FP8[right.dtype], EVEN=S % TILE["BS"] == 0,
    )  # fmt: skip


def _launch(
    kernel: Any,
    operands: tuple[Tensor, ...],
    shape: tuple[int, int],
    dtype: torch.dtype,
    numbers: tuple[Tensor | int, ...],
    **constants: Any,
) -> Tensor:
    """Run one tile a program: kernel(*operands, out, *numbers). Returns out, of `shape` and `dtype`."""
    if dtype not in TL_DTYPE:
        raise UsageError(f"block-scaled products give bfloat16 or float32, not {dtype}")
    out = torch.empty(shape, dtype=dtype, device=operands[0].device)
    tiles = triton.cdiv(shape[0], TILE["BL"]) * triton.cdiv(shape[1], TILE["BR"])
    kernel[(tiles,)](*operands, out, *numbers, **TILE, DTYPE=TL_DTYPE[dtype], **constants, **OPTIONS)
    return out


def _check_card(matrix: Tensor, majors: tuple[int, ...]) -> None:
    if matrix.device.type != "cuda" or torch.cuda.get_device_capability(matrix.device)[0] not in majors:
        wanted = " or ".join(f"{major}.x" for major in majors)
        raise UsageError(
            f"this block-scaled product is for compute capability {wanted}, which {matrix.device} is not; "
            "use the emulated or the plain FP8 product"
        )
