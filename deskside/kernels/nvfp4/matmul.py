"""A BF16 matmul with float32 accumulation and float32 scales that are read on the device: emulated NVFP4, on any GPU.

An emulated NVFP4 operand is code x block scale, which is exact in BF16, and one global scale for the tensor. The global
scales are applied in the epilogue, where the sum is still float32; in the BF16 operands they would be rounded to 8
bits. torch passes such scales to cuBLAS only for FP8, hence this kernel.

The three products of a linear layer y_NM = x_NK W_MK^T, by the layout of their operands in memory:
  "nt"  (L, S) x (R, S)^T   y = x W^T
  "nn"  (L, S) x (S, R)     dx = dy W
  "tn"  (S, L)^T x (S, R)   dW = dy^T x

On compute capability 9.0 and 10.x, operands and results go through tensor descriptors (TMA), and each multiprocessor
loops over many tiles, so that the loads of the next tile overlap with the epilogue. Others use pointers and, but for
8.0, tiles so small that two programs fit into the 99 KB of a consumer card. A product with too few tiles to fill the
card (a weight gradient: small result, long sum) is split along the sum, and the parts are added in a fixed order, so
that results are deterministic. Tile sizes follow from the compute capability: autotuning takes seconds at every start.
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
class TileConfig:
    """Tile sizes along L and R (the result) and S (the sum), and launch options.

    descriptors: use `descriptor_kernel`. extra_stages: further stages that fit if the result is bfloat16. group: tiles
    along L that run together and share the columns of R in the L2 cache.
    """

    L: int
    R: int
    S: int
    warps: int
    stages: int
    descriptors: bool
    extra_stages: int = 0
    group: int = 8

    def constants(self, layout: Layout) -> dict[str, Any]:
        return {
            "LEFT_TRANSPOSED": layout == "tn",
            "RIGHT_TRANSPOSED": layout == "nt",
            "BL": self.L,
            "BR": self.R,
            "BS": self.S,
            "GROUP": self.group,
        }

    def options(self, result: torch.dtype) -> dict[str, int]:
        extra_stages = self.extra_stages if result == torch.bfloat16 else 0
        return {"num_warps": self.warps, "num_stages": self.stages + extra_stages}


def tile_config(capability: tuple[int, int]) -> TileConfig:
    """Return the tile sizes for a compute capability.

    Shared memory must hold `stages` tiles of both operands (without descriptors one fewer), and half a tile of the
    result.
    """
    if capability[0] in (9, 10):
        return TileConfig(
            128, 256, 64, warps=8, stages=3, descriptors=True, extra_stages=int(capability[0] == 9)
        )
    if capability == (8, 0):
        return TileConfig(128, 256, 64, warps=8, stages=3, descriptors=False)
    return TileConfig(128, 128, 32, warps=4, stages=4, descriptors=False)


@triton.jit
def tile_origin(tile, L, R, BL: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first row and column of a tile.

    Programs that run at the same time share the L2 cache. So tiles are ordered in groups of GROUP rows of tiles, column
    by column within a group.
    """
    down = tl.cdiv(L, BL)
    across = tl.cdiv(R, BR)
    group = tile // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    within = tile % (GROUP * across)
    return (group * GROUP + within % height) * BL, (within // height) * BR


@triton.jit
def _tile_and_part(tile, L, R, BL: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the origin of a tile and its part of the sum. All tiles of one part come before those of the next."""
    tiles = tl.cdiv(L, BL) * tl.cdiv(R, BR)
    i, j = tile_origin(tile % tiles, L, R, BL, BR, GROUP)
    return i, j, tile // tiles


@triton.jit
def _scales(scale_a_ptr, scale_b_ptr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the product of both scales, or 1 if `add_parts_kernel` applies them."""
    factor = 1.0
    if PARTS == 1:
        factor = tl.load(scale_a_ptr) * tl.load(scale_b_ptr)
    return factor


@triton.jit
def descriptor_kernel(  # type: ignore[no-untyped-def]
    left, right, out, scale_a_ptr, scale_b_ptr, L, R, S,
    LEFT_TRANSPOSED: tl.constexpr, RIGHT_TRANSPOSED: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute out (PARTS, L, R), several tiles per program. Values beyond an edge are read as zero and not written."""
    tiles = tl.cdiv(L, BL) * tl.cdiv(R, BR) * PARTS
    steps = tl.cdiv(tl.cdiv(S, BS), PARTS)
    factor = _scales(scale_a_ptr, scale_b_ptr, PARTS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        i, j, part = _tile_and_part(tile, L, R, BL, BR, GROUP)
        acc = tl.zeros((BL, BR), tl.float32)
        for step in range(steps):
            s = (part * steps + step) * BS
            if LEFT_TRANSPOSED:
                a = left.load([s, i]).T
            else:
                a = left.load([i, s])
            if RIGHT_TRANSPOSED:
                b = right.load([j, s]).T
            else:
                b = right.load([s, j])
            acc = tl.dot(a, b, acc)
        # Stored in two halves: a whole tile in float32 would not fit into shared memory with the operands.
        halves = tl.permute(tl.reshape(acc * factor, (BL, 2, BR // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        out.store([part, i, j], tl.reshape(first.to(DTYPE), (1, BL, BR // 2)))
        out.store([part, i, j + BR // 2], tl.reshape(second.to(DTYPE), (1, BL, BR // 2)))


@triton.jit
def pointer_kernel(  # type: ignore[no-untyped-def]
    left, right, out, scale_a_ptr, scale_b_ptr, L, R, S,
    LEFT_TRANSPOSED: tl.constexpr, RIGHT_TRANSPOSED: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute one tile per program. EVEN: no step goes beyond the sum. Rows beyond an edge wrap around, unwritten."""
    i0, j0, part = _tile_and_part(tl.program_id(0), L, R, BL, BR, GROUP)
    steps = tl.cdiv(tl.cdiv(S, BS), PARTS)
    i = i0 + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    s = part * steps * BS + tl.arange(0, BS)
    i_read = (i % L).to(tl.int64)
    j_read = (j % R).to(tl.int64)
    if LEFT_TRANSPOSED:
        a_ptrs = left + s.to(tl.int64)[None, :] * L + i_read[:, None]
        a_step = L.to(tl.int64) * BS
    else:
        a_ptrs = left + i_read[:, None] * S + s[None, :]
        a_step = BS
    if RIGHT_TRANSPOSED:
        b_ptrs = right + j_read[None, :] * S + s[:, None]
        b_step = BS
    else:
        b_ptrs = right + s.to(tl.int64)[:, None] * R + j_read[None, :]
        b_step = R.to(tl.int64) * BS
    acc = tl.zeros((BL, BR), tl.float32)
    for _ in range(steps):
        if EVEN:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(s < S)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(s < S)[:, None], other=0.0)
            s += BS
        acc = tl.dot(a, b, acc)
        a_ptrs += a_step
        b_ptrs += b_step
    result = (acc * _scales(scale_a_ptr, scale_b_ptr, PARTS)).to(DTYPE)
    out_ptrs = out + (part.to(tl.int64) * L + i[:, None]) * R + j[None, :]
    tl.store(out_ptrs, result, mask=(i < L)[:, None] & (j < R)[None, :])


@triton.jit
def add_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, out_ptr, scale_a_ptr, scale_b_ptr, numel,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write out = scales x the sum of the parts, added from first to last."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * numel.to(tl.int64) + offsets, mask=offsets < numel, other=0.0)
    tl.store(
        out_ptr + offsets, (total * _scales(scale_a_ptr, scale_b_ptr, 1)).to(DTYPE), mask=offsets < numel
    )


def scaled_matmul(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    layout: Layout,
    *,
    scale_b: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return scale_a x scale_b x (left times right), (L, R) bfloat16 or float32, accumulated in float32.

    left, right: contiguous bfloat16 matrices in one of the layouts of the module docstring. scale_a, scale_b: one
    float32 number each, on the device, the global scales of left and right; None is 1. Raises UsageError for
    unsupported inputs.
    """
    L, R, S = _sizes(left, right, layout)
    _check(left, right, scale_a, scale_b, dtype)
    out = torch.empty(L, R, dtype=dtype, device=left.device)
    if not out.numel():
        return out
    if not S:
        return out.zero_()
    tiles, multiprocessors = _card(left.device)
    count = triton.cdiv(L, tiles.L) * triton.cdiv(R, tiles.R)
    steps = triton.cdiv(S, tiles.S)
    parts = num_parts(count, steps, multiprocessors)
    result = out.view(1, L, R) if parts == 1 else left.new_empty(parts, L, R, dtype=torch.float32)
    scale_b = one_on(left.device) if scale_b is None else scale_b
    constants = tiles.constants(layout) | {"PARTS": parts, "DTYPE": TL_DTYPE[result.dtype]}
    if tiles.descriptors:
        shapes = {"nt": ("LS", "RS"), "nn": ("LS", "SR"), "tn": ("SL", "SR")}[layout]
        blocks = [[getattr(tiles, axis) for axis in axes] for axes in shapes]
        descriptor_kernel[(min(count * parts, multiprocessors),)](
            TensorDescriptor.from_tensor(left, blocks[0]),
            TensorDescriptor.from_tensor(right, blocks[1]),
            TensorDescriptor.from_tensor(result, [1, tiles.L, tiles.R // 2]),
            *(scale_a, scale_b, L, R, S),
            **constants,
            **tiles.options(result.dtype),
        )
    else:
        even = S % (tiles.S * parts) == 0
        pointer_kernel[(count * parts,)](
            *(left, right, result, scale_a, scale_b, L, R, S),
            **constants,
            EVEN=even,
            **tiles.options(result.dtype),
        )
    if parts > 1:
        add_parts_kernel[(triton.cdiv(out.numel(), 1024),)](
            result, out, scale_a, scale_b, out.numel(), PARTS=parts, BLOCK=1024, DTYPE=TL_DTYPE[dtype]
        )
    return out


def num_parts(tiles: int, steps: int, multiprocessors: int) -> int:
    """Return the number of parts to split the sum into, the one with the lowest estimated time.

    The unit of time is one step of one tile. The prologue and epilogue of a tile cost about 8 steps, writing and
    reading a part of a tile 0.1, and the second kernel 8.
    """

    def cost(parts: int) -> float:
        rounds = -(-tiles * parts // multiprocessors)
        return rounds * (-(-steps // parts) + 8) + (parts > 1) * (8 + 0.1 * parts * tiles)

    return min(range(1, min(32, max(1, steps // 8)) + 1), key=cost)


TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}  # of results


@cache
def one_on(device: torch.device) -> Tensor:
    """Return a cached 1.0 on the device."""
    return torch.ones((), dtype=torch.float32, device=device)


@cache
def _card(device: torch.device) -> tuple[TileConfig, int]:
    properties = torch.cuda.get_device_properties(device)
    return tile_config((properties.major, properties.minor)), properties.multi_processor_count


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


def _check(left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor | None, dtype: torch.dtype) -> None:
    # The interpreter cannot multiply bfloat16, so tests pass float32.
    interpreted = triton.knobs.runtime.interpret
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
    for scale in (scale_a, scale_b):
        if scale is not None and (
            scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != left.device
        ):
            raise UsageError(f"scaled_matmul's scales must each be one float32 number on {left.device}")
    if dtype not in TL_DTYPE:
        raise UsageError(f"scaled_matmul gives bfloat16 or float32, not {dtype}")
