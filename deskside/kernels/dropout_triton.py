"""The Triton kernel of `dropout.py`, with the same masks. It reads and writes each value once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.dropout import CHANNELS_PER_CALL, scale

TOKENS, CALLS = 16, 32  # per program


@triton.jit
def _drop(X, OUT, bits, tokens, channels, mask, dropped, factor, D):  # type: ignore[no-untyped-def]
    offsets = tokens[:, None] * D + channels[None, :]
    mask = mask & (channels < D)[None, :]
    x = tl.load(X + offsets, mask=mask, other=0.0).to(tl.float32) * factor
    x = tl.where(bits.to(tl.int32) >= dropped, x, 0.0)
    tl.store(OUT + offsets, x.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def drop(  # type: ignore[no-untyped-def]
    X, OUT, POSITION, N, dropped, factor, D, calls, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Process BLOCK_N tokens of X (N, D) and BLOCK_C of the `calls` of Philox for each of them."""
    tokens = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    call = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    seed, stream = tl.load(POSITION), tl.load(POSITION + 1)
    step, first = tl.load(POSITION + 2), tl.load(POSITION + 3)
    zeros = tl.zeros((BLOCK_N, BLOCK_C), tl.uint32)
    a, b, c, d = tl.philox(
        seed,
        zeros + call[None, :].to(tl.uint32),
        zeros + (first + tokens)[:, None].to(tl.uint32),
        zeros + stream.to(tl.uint32),
        zeros + step.to(tl.uint32),
    )
    mask = (tokens < N)[:, None] & (call < calls)[None, :]
    _drop(X, OUT, a & 0xFFFF, tokens, call, mask, dropped, factor, D)
    _drop(X, OUT, b & 0xFFFF, tokens, call + calls, mask, dropped, factor, D)
    _drop(X, OUT, c & 0xFFFF, tokens, call + 2 * calls, mask, dropped, factor, D)
    _drop(X, OUT, d & 0xFFFF, tokens, call + 3 * calls, mask, dropped, factor, D)
    _drop(X, OUT, a >> 16, tokens, call + 4 * calls, mask, dropped, factor, D)
    _drop(X, OUT, b >> 16, tokens, call + 5 * calls, mask, dropped, factor, D)
    _drop(X, OUT, c >> 16, tokens, call + 6 * calls, mask, dropped, factor, D)
    _drop(X, OUT, d >> 16, tokens, call + 7 * calls, mask, dropped, factor, D)


def dropout(x: Tensor, position: Tensor, dropped: int) -> Tensor:
    """Return x, contiguous, with masked and scaled values; see `dropout.dropout`. dropped: `dropout.threshold`."""
    channels = x.shape[-1]
    tokens, calls = x.numel() // channels, triton.cdiv(channels, CHANNELS_PER_CALL)
    out = torch.empty_like(x)
    grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(calls, CALLS))
    drop[grid](x, out, position, tokens, dropped, scale(dropped), channels, calls, TOKENS, CALLS, num_warps=4)
    return out
