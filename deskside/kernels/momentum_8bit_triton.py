"""The Triton kernel of `momentum_8bit.look_ahead_8bit`."""

import triton
import triton.language as tl
from torch import Tensor

TINY = tl.constexpr(2.0**-126)  # the smallest normal float32
BLOCKS_PER_PROGRAM = 8


@triton.jit
def _maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit
def _look_ahead_8bit(  # type: ignore[no-untyped-def]
    g_ptr, codes_ptr, scales_ptr, skip_ptr, clip_ptr, momentum, n,
    NESTEROV: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Process ROWS blocks of WIDTH values per program. LARGEST: the largest code."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask, row_mask = offsets < n, row * WIDTH < n
    m = tl.load(codes_ptr + offsets, mask, 0).to(tl.float32)
    m *= tl.load(scales_ptr + row, row_mask, 0.0)[:, None]
    if tl.load(skip_ptr) > 0:
        tl.store(g_ptr + offsets, m.to(g_ptr.dtype.element_ty), mask)
        return
    g = tl.load(g_ptr + offsets, mask, 0.0).to(tl.float32)
    if clip_ptr is not None:
        g *= tl.load(clip_ptr)
    m += (g - m) * (1 - momentum)
    direction = m
    if NESTEROV:
        direction = m - (m - g) * (1 - momentum)
    tl.store(g_ptr + offsets, direction.to(g_ptr.dtype.element_ty), mask)
    scales = tl.reduce(tl.abs(m), 1, _maximum) / LARGEST
    tl.store(scales_ptr + row, scales, row_mask)
    inverse = tl.where(scales > TINY, 1 / scales, 0.0)
    tl.store(codes_ptr + offsets, tl.floor(m * inverse[:, None] + 0.5).to(tl.int8), mask)


def launch(
    g: Tensor,
    codes: Tensor,
    scales: Tensor,
    momentum: float,
    nesterov: bool,
    skip: Tensor,
    clip: Tensor | None,
    block: int,
    largest: int,
) -> None:
    """See `momentum_8bit.look_ahead_8bit`. block: values that share a scale. largest: code."""
    n = g.numel()
    _look_ahead_8bit[(triton.cdiv(n, BLOCKS_PER_PROGRAM * block),)](
        g, codes, scales, skip, clip, momentum, n,
        NESTEROV=nesterov, ROWS=BLOCKS_PER_PROGRAM, WIDTH=block, LARGEST=largest,
    )  # fmt: skip
