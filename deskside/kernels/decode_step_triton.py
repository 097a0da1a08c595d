"""The kernels of decode_step.py in Triton, and their launches. Imported only where tensors are on a GPU.

`_largest` finds the largest logit of a piece of a row, and its token; `_first_of_largest` that of all pieces of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deskside.kernels import decode_step
from deskside.kernels.dependent_launch import launch_options

PIECE = 4096  # logits per program
NOT_FINITE = tl.constexpr(decode_step.NOT_FINITE)


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    LOGITS, LARGEST, TOKEN, V, row_stride, PIECE: tl.constexpr, PDL: tl.constexpr
):
    """LARGEST, TOKEN: (B, pieces), float32 and int32. The largest of a piece with NaN is +inf."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(LOGITS + row * row_stride + token, token < V, float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    largest = tl.max(x, axis=0)
    first = tl.min(tl.where(x == largest, token, V), axis=0)
    place = row * tl.num_programs(1) + piece
    tl.store(LARGEST + place, largest)
    tl.store(TOKEN + place, first)


@triton.jit
def _first_of_largest(  # type: ignore[no-untyped-def]
    LARGEST, TOKEN, OUT, pieces, V, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    piece = tl.arange(0, BLOCK)
    x = tl.load(LARGEST + row * pieces + piece, piece < pieces, float("-inf"))
    token = tl.load(TOKEN + row * pieces + piece, piece < pieces, V)
    largest = tl.max(x, axis=0)
    first = tl.min(tl.where(x == largest, token, V), axis=0)
    finite = tl.abs(largest) < float("inf")
    tl.store(OUT + row, tl.where(finite, first, NOT_FINITE).to(tl.int64))


def largest_of_pieces(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each piece of PIECE logits, +inf for NaN, and its first token: (B, pieces).

    float32 and int32. The last dimension of the logits must be contiguous.
    """
    (B, V), device = logits_BV.shape, logits_BV.device
    assert logits_BV.stride(1) == 1 or V == 1
    pieces = triton.cdiv(V, PIECE)
    largest = torch.empty(B, pieces, dtype=torch.float32, device=device)
    token = torch.empty(B, pieces, dtype=torch.int32, device=device)
    _largest[(B, pieces)](
        logits_BV, largest, token, V, logits_BV.stride(0), PIECE, num_warps=4, **launch_options(device, B * pieces)
    )  # fmt: skip
    return largest, token


def greedy_tokens(logits_BV: Tensor) -> Tensor:
    """See `decode_step.greedy_tokens`. The last dimension must be contiguous."""
    (B, V), device = logits_BV.shape, logits_BV.device
    largest, token = largest_of_pieces(logits_BV)
    pieces = largest.shape[1]
    out_B = torch.empty(B, dtype=torch.int64, device=device)
    _first_of_largest[(B,)](
        largest, token, out_B, pieces, V, triton.next_power_of_2(pieces), num_warps=1, **launch_options(device, B)
    )  # fmt: skip
    return out_B


@triton.jit
def _write_state(  # type: ignore[no-untyped-def]
    STATE, LANES, TOKEN, LENGTH, COUNT, added, B, dummy, token_stride, length_stride, count_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """STATE: (dummy + 1, 3), whose row `dummy` stays zero."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.load(LANES + b, b < B, dummy)
    token = tl.load(TOKEN + b * token_stride, b < B, 0)
    length = tl.load(LENGTH + b * length_stride, b < B, 0)
    count = tl.load(COUNT + b * count_stride, b < B, 0)
    mask = lane < dummy
    tl.store(STATE + 3 * lane, tl.maximum(token, 0), mask)
    tl.store(STATE + 3 * lane + 1, length + added, mask)
    tl.store(STATE + 3 * lane + 2, count + added, mask)


def write_state(
    state_S3: Tensor, lanes_B: Tensor, token_B: Tensor, length_B: Tensor, count_B: Tensor, added: int = 0
) -> None:
    """See `decode_step.write_state`."""
    B, block = len(lanes_B), 64
    grid = (triton.cdiv(B, block),)
    _write_state[grid](
        state_S3, lanes_B.contiguous(), token_B, length_B, count_B, added, B, len(state_S3) - 1,
        token_B.stride(0), length_B.stride(0), count_B.stride(0), block,
        num_warps=2, **launch_options(state_S3.device, grid[0]),
    )  # fmt: skip
