"""The Triton kernel of `momentum_8bit.look_ahead_8bit`."""

import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.adamw_state import BLOCK, SMALLEST_MAX
from deskside.kernels.adamw_triton import BLOCKS_PER_PROGRAM, maximum

SMALLEST = tl.constexpr(SMALLEST_MAX)


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
    scales = tl.reduce(tl.abs(m), 1, maximum) / LARGEST
    tl.store(scales_ptr + row, scales, row_mask)
    inverse = tl.where(scales > SMALLEST, 1 / scales, 0.0)
    tl.store(codes_ptr + offsets, tl.floor(m * inverse[:, None] + 0.5).to(tl.int8), mask)


def launch(
    g: Tensor,
    codes: Tensor,
    scales: Tensor,
    momentum: float,
    nesterov: bool,
    skip: Tensor,
    clip: Tensor | None,
    largest: int,
) -> None:
    """See `momentum_8bit.look_ahead_8bit`. largest: the largest code."""
    n = g.numel()
    _look_ahead_8bit[(triton.cdiv(n, BLOCKS_PER_PROGRAM * BLOCK),)](
        g, codes, scales, skip, clip, momentum, n,
        NESTEROV=nesterov, ROWS=BLOCKS_PER_PROGRAM, WIDTH=BLOCK, LARGEST=largest,
    )  # fmt: skip
