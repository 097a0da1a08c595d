"""The exponential random numbers of the engine (engine/counter_rng.py) in one Triton kernel, for tensors on a GPU.

In torch they are some thirty passes over 64-bit integers, of the whole vocabulary where no filter ranks it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.utils import splitmix

GOLDEN = tl.constexpr(splitmix.GOLDEN)
FIRST, SECOND = tl.constexpr(splitmix.FIRST), tl.constexpr(splitmix.SECOND)
BLOCK = 1024


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def _exponentials(  # type: ignore[no-untyped-def]
    STREAM, COUNT, TOKEN, OUT, W, stream_step, count_step, token_row, token_column,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row. STREAM, COUNT: (B,) by their steps; TOKEN: (B, W) by its strides; OUT: (B, W)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < W
    stream = tl.load(STREAM + row * stream_step).to(tl.uint64, bitcast=True)
    count = tl.load(COUNT + row * count_step).to(tl.uint64, bitcast=True)
    purpose = tl.full((), PURPOSE, tl.uint64)
    base = _mix(_mix(stream + purpose * GOLDEN) + count * GOLDEN)
    token = tl.load(TOKEN + row * token_row + at * token_column, mask=here, other=0)
    bits = _mix(base + (token + 1).to(tl.uint64, bitcast=True) * GOLDEN) >> 32
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    u = tl.minimum(u, 1 - 5.960464477539063e-08)  # 1 - 2^-24
    # -log1p(-u), as Kahan does it: the rounding of 1 - u cancels in the quotient.
    rest = 1.0 - u
    gone = 1.0 - rest
    out = tl.where(gone > 0, -tl.log(rest) * (u / tl.where(gone > 0, gone, 1.0)), u)
    tl.store(OUT + row * W + at, out, mask=here)


def exponentials(stream_B: Tensor, count_B: Tensor, purpose: int, token_BW: Tensor) -> Tensor:
    """(B, W) float32; stream, count and token int64, with any strides."""
    B, W = token_BW.shape
    out = torch.empty(B, W, dtype=torch.float32, device=token_BW.device)
    _exponentials[(B, triton.cdiv(W, BLOCK))](
        stream_B, count_B, token_BW, out, W,
        stream_B.stride(0), count_B.stride(0), token_BW.stride(0), token_BW.stride(1),
        purpose, BLOCK, num_warps=4,
    )  # fmt: skip
    return out
