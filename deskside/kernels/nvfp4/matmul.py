"""A BF16 product with float32 sums and a float32 factor that is read from the device: emulated NVFP4, on any card.

An NVFP4 operand is code x block scale, exact in BF16, and one global scale for the tensor. The global scales belong
into the epilogue, where the sum is still float32; folded into BF16 operands they would cost 8 bits of it. cuBLAS takes
such a factor from the device for FP8 only, hence this kernel.

The three products of a linear layer y_NM = x_NK W_MK^T, by how their operands lie in memory:
  "nt"  (L, S) x (R, S)^T   y = x W^T
  "nn"  (L, S) x (S, R)     dx = dy W
  "tn"  (S, L)^T x (S, R)   dW = dy^T x

On compute capability 9.0 and 10.x operands come and results go through tensor descriptors (TMA), and each
multiprocessor walks over many tiles, so that the next tile's loads run during this one's epilogue. Other cards load
through pointers, in tiles that fit twice into the 99 KB of a consumer card. A product whose tiles do not fill the
card (weight gradients: small results, long sums) is split along the sum; the parts are added in a fixed order, so
results do not change from call to call. Tiles are chosen by arithmetic: trying them out would cost seconds at start.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deskside.utils.errors import UsageError

Layout = Literal["nt", "nn", "tn"]


@dataclass(frozen=True)
class Tiles:
    """L x R of the result by S of the sum. spare: stages more that fit where the result is bfloat16.

    group: tiles along L that share the columns of R in the L2 cache.
    """

    L: int
    R: int
    S: int
    warps: int
    stages: int
    descriptors: bool
    spare: int = 0
    group: int = 8

    def constants(self, layout: Layout) -> dict[str, Any]:
        return {
            "LEFT_TURNED": layout == "tn",
            "RIGHT_TURNED": layout == "nt",
            "BL": self.L,
            "BR": self.R,
            "BS": self.S,
            "GROUP": self.group,
        }

    def options(self, result: torch.dtype) -> dict[str, int]:
        spare = self.spare if result == torch.bfloat16 else 0
        return {"num_warps": self.warps, "num_stages": self.stages + spare}


def tiles_for(capability: tuple[int, int]) -> Tiles:
    """Shared memory holds `stages` tiles of both operands (one less without descriptors), and half a result."""
    if capability[0] in (9, 10):
        return Tiles(128, 256, 64, warps=8, stages=3, descriptors=True, spare=int(capability[0] == 9))
    if capability == (8, 0):
        return Tiles(128, 256, 64, warps=8, stages=3, descriptors=False)
    return Tiles(128, 128, 32, warps=4, stages=4, descriptors=False)


@triton.jit
def corner(tile, L, R, BL: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and column of a tile. Programs that run together share the L2 cache, so tiles are taken in groups of
    GROUP rows: all of them in one column of tiles before the next column."""
    down = tl.cdiv(L, BL)
    across = tl.cdiv(R, BR)
    group = tile // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    within = tile % (GROUP * across)
    return (group * GROUP + within % height) * BL, (within // height) * BR


@triton.jit
def _place(tile, L, R, BL: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The corner of a tile, and its part of the sum: the tiles of one part come before those of the next."""
    tiles = tl.cdiv(L, BL) * tl.cdiv(R, BR)
    i, j = corner(tile % tiles, L, R, BL, BR, GROUP)
    return i, j, tile // tiles


@triton.jit
def _factor(alpha_ptr, second_ptr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The product of both scales; 1 where the parts of a sum are still to be added."""
    factor = 1.0
    if PARTS == 1:
        factor = tl.load(alpha_ptr) * tl.load(second_ptr)
    return factor


@triton.jit
def descriptor_kernel(  # type: ignore[no-untyped-def]
    left, right, out, alpha_ptr, second_ptr, L, R, S,
    LEFT_TURNED: tl.constexpr, RIGHT_TURNED: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """out (PARTS, L, R). What lies beyond an edge is read as zero and not written."""
    tiles = tl.cdiv(L, BL) * tl.cdiv(R, BR) * PARTS
    steps = tl.cdiv(tl.cdiv(S, BS), PARTS)
    factor = _factor(alpha_ptr, second_ptr, PARTS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        i, j, part = _place(tile, L, R, BL, BR, GROUP)
        total = tl.zeros((BL, BR), tl.float32)
        for step in range(steps):
            s = (part * steps + step) * BS
            if LEFT_TURNED:
                a = left.load([s, i]).T
            else:
                a = left.load([i, s])
            if RIGHT_TURNED:
                b = right.load([j, s]).T
            else:
                b = right.load([s, j])
            total = tl.dot(a, b, total)
        # In two halves: a whole tile in float32 would not fit into shared memory beside the operands.
        halves = tl.permute(tl.reshape(total * factor, (BL, 2, BR // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        out.store([part, i, j], tl.reshape(first.to(DTYPE), (1, BL, BR // 2)))
        out.store([part, i, j + BR // 2], tl.reshape(second.to(DTYPE), (1, BL, BR // 2)))


@triton.jit
def pointer_kernel(  # type: ignore[no-untyped-def]
    left, right, out, alpha_ptr, second_ptr, L, R, S,
    LEFT_TURNED: tl.constexpr, RIGHT_TURNED: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile a program. EVEN: all steps of the sum are whole. Rows beyond an edge read others and are not written."""
    i0, j0, part = _place(tl.program_id(0), L, R, BL, BR, GROUP)
    steps = tl.cdiv(tl.cdiv(S, BS), PARTS)
    i = i0 + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    s = part * steps * BS + tl.arange(0, BS)
    i_read = (i % L).to(tl.int64)
    j_read = (j % R).to(tl.int64)
    if LEFT_TURNED:
        a_at = left + s.to(tl.int64)[None, :] * L + i_read[:, None]
        a_step = L.to(tl.int64) * BS
    else:
        a_at = left + i_read[:, None] * S + s[None, :]
        a_step = BS
    if RIGHT_TURNED:
        b_at = right + j_read[None, :] * S + s[:, None]
        b_step = BS
    else:
        b_at = right + s.to(tl.int64)[:, None] * R + j_read[None, :]
        b_step = R.to(tl.int64) * BS
    total = tl.zeros((BL, BR), tl.float32)
    for _ in range(steps):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(s < S)[None, :], other=0.0)
            b = tl.load(b_at, mask=(s < S)[:, None], other=0.0)
            s += BS
        total = tl.dot(a, b, total)
        a_at += a_step
        b_at += b_step
    result = (total * _factor(alpha_ptr, second_ptr, PARTS)).to(DTYPE)
    at = out + (part.to(tl.int64) * L + i[:, None]) * R + j[None, :]
    tl.store(at, result, mask=(i < L)[:, None] & (j < R)[None, :])


@triton.jit
def add_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, out_ptr, alpha_ptr, second_ptr, numel,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """out = factor x sum of the parts, added from the first to the last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * numel.to(tl.int64) + at, mask=at < numel, other=0.0)
    tl.store(out_ptr + at, (total * _factor(alpha_ptr, second_ptr, 1)).to(DTYPE), mask=at < numel)


def scaled_matmul(
    left: Tensor,
    right: Tensor,
    alpha: Tensor,
    layout: Layout,
    *,
    second: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """alpha x second x (left times right), (L, R), bfloat16 or float32; sums in float32.

    left, right: contiguous bfloat16 matrices, laid out as `layout` says (see above). alpha, second: float32, one
    number on the device each: the global scales of both operands.
    Raises UsageError for what this cannot do.
    """
    L, R, S = _sizes(left, right, layout)
    _check(left, right, alpha, second, dtype)
    out = torch.empty(L, R, dtype=dtype, device=left.device)
    if not out.numel():
        return out
    if not S:
        return out.zero_()
    tiles, multiprocessors = _card(left.device)
    count = triton.cdiv(L, tiles.L) * triton.cdiv(R, tiles.R)
    steps = triton.cdiv(S, tiles.S)
    parts = split(count, steps, multiprocessors)
    result = out.view(1, L, R) if parts == 1 else left.new_empty(parts, L, R, dtype=torch.float32)
    second = one(left.device) if second is None else second
    constants = tiles.constants(layout) | {"PARTS": parts, "DTYPE": TL_DTYPE[result.dtype]}
    if tiles.descriptors:
        shapes = {"nt": ("LS", "RS"), "nn": ("LS", "SR"), "tn": ("SL", "SR")}[layout]
        blocks = [[getattr(tiles, axis) for axis in axes] for axes in shapes]
        descriptor_kernel[(min(count * parts, multiprocessors),)](
            TensorDescriptor.from_tensor(left, blocks[0]),
            TensorDescriptor.from_tensor(right, blocks[1]),
            TensorDescriptor.from_tensor(result, [1, tiles.L, tiles.R // 2]),
            *(alpha, second, L, R, S),
            **constants,
            **tiles.options(result.dtype),
        )
    else:
        even = S % (tiles.S * parts) == 0
        pointer_kernel[(count * parts,)](
            *(left, right, result, alpha, second, L, R, S),
            **constants,
            EVEN=even,
            **tiles.options(result.dtype),
        )
    if parts > 1:
        add_parts_kernel[(triton.cdiv(out.numel(), 1024),)](
            result, out, alpha, second, out.numel(), PARTS=parts, BLOCK=1024, DTYPE=TL_DTYPE[dtype]
        )
    return out


def split(tiles: int, steps: int, multiprocessors: int) -> int:
    """In how many parts to cut the sum, by counting: rounds of tiles, and the traffic of the parts.

    In units of one step of one tile. A tile's start and end cost about 8 steps, writing and reading a part of a tile
    0.1, and the second kernel 8.
    """

    def cost(parts: int) -> float:
        rounds = -(-tiles * parts // multiprocessors)
        return rounds * (-(-steps // parts) + 8) + (parts > 1) * (8 + 0.1 * parts * tiles)

    return min(range(1, min(32, max(1, steps // 8)) + 1), key=cost)


TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}  # of results


@cache
def one(device: torch.device) -> Tensor:
    """1.0 on the device, made once."""
    return torch.ones((), dtype=torch.float32, device=device)


@cache
def _card(device: torch.device) -> tuple[Tiles, int]:
    properties = torch.cuda.get_device_properties(device)
    return tiles_for((properties.major, properties.minor)), properties.multi_processor_count


def _sizes(left: Tensor, right: Tensor, layout: Layout) -> tuple[int, int, int]:
    if left.dim() != 2 or right.dim() != 2:
        raise UsageError(
            f"scaled_matmul takes two matrices, not {tuple(left.shape)} and {tuple(right.shape)}"
        )
    rows_left, columns_left = left.shape
    rows_right, columns_right = right.shape
    L, S = (columns_left, rows_left) if layout == "tn" else (rows_left, columns_left)
    R, S_right = (rows_right, columns_right) if layout == "nt" else (columns_right, rows_right)
    if S_right != S:
        raise UsageError(
            f"scaled_matmul '{layout}' of {rows_left} x {columns_left} and {rows_right} x {columns_right}: "
            f"the summed dimensions are {S} and {S_right}, and must be equal"
        )
    return L, R, S


def _check(left: Tensor, right: Tensor, alpha: Tensor, second: Tensor | None, dtype: torch.dtype) -> None:
    interpreted = triton.knobs.runtime.interpret  # which cannot multiply bfloat16
    if left.device.type != "cuda" and not interpreted:
        raise UsageError(f"scaled_matmul needs CUDA tensors, these are on {left.device}; use torch.mm there")
    for name, matrix in (("left", left), ("right", right)):
        if (
            matrix.dtype != (torch.float32 if interpreted else torch.bfloat16)
            or not matrix.is_contiguous()
            or matrix.device != left.device
        ):
            raise UsageError(
                f"scaled_matmul's {name} operand must be contiguous bfloat16 on {left.device}; "
                f"it is {matrix.dtype} on {matrix.device} with strides {matrix.stride()}"
            )
        if matrix.shape[1] % 16 or matrix.data_ptr() % 16:
            raise UsageError(
                f"scaled_matmul's {name} operand has rows of {matrix.shape[1]} values from address "
                f"{matrix.data_ptr()}; both must be divisible by 16: pad or clone it"
            )
    for number in (alpha, second):
        if number is not None and (
            number.numel() != 1 or number.dtype != torch.float32 or number.device != left.device
        ):
            raise UsageError(f"scaled_matmul's factors must each be one float32 number on {left.device}")
    if dtype not in TL_DTYPE:
        raise UsageError(f"scaled_matmul gives bfloat16 or float32, not {dtype}")
