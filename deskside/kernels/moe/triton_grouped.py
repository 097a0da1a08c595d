"""Grouped products of a mixture of experts: each expert's rows with its weights, and the gradient of the weights.

How many rows an expert has is known on the device only. The grid therefore covers the largest number of row tiles that
any routing needs, and each program finds its expert from `ENDS` (E,), the first row after those of each expert:

    ENDS  5, 5, 21, tiles of 8 rows:   tile 0     expert 0, rows 0 to 4
                                       tiles 1, 2 expert 2, rows 5 to 12 and 13 to 20
                                       others     nothing to do

So nothing waits for the device, and a CUDA graph serves all routings. No two programs write the same element, so that
results are deterministic.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_gated import activation
from deskside.kernels.nvfp4.matmul import tile_origin


@triton.jit
def _rows_of_tile(tile, ENDS, E, BL: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row tile's expert and first row, and the first row after the expert's; all 0 for a tile without rows."""
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ENDS + experts, mask=experts < E, other=0)
    starts = tl.load(ENDS + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = tl.where(experts < E, (ends - starts + (BL - 1)) // BL, 0)
    last = tl.cumsum(tiles, axis=0)
    within = tile - (last - tiles)
    chosen = (within >= 0) & (tile < last)  # one expert, or none
    expert = tl.sum(tl.where(chosen, experts, 0))
    first = tl.sum(tl.where(chosen, starts + within * BL, 0))
    return expert, first, tl.sum(tl.where(chosen, ends, 0))


@triton.jit
def grouped_matmul(  # type: ignore[no-untyped-def]
    X, W, OUT, ENDS, row_tiles, M, K, E,
    TRANSPOSE: tl.constexpr, BLOCK_E: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write OUT (S, M), one tile per program, for X (S, K) and W (E, M, K), or W (E, K, M) if not TRANSPOSE.

    EVEN: K is a multiple of BS. For rows and columns beyond an edge, other ones are read, and nothing is written.
    """
    i, j0 = tile_origin(tl.program_id(0), row_tiles * BL, M, BL, BR, GROUP)
    expert, first, stop = _rows_of_tile(i // BL, ENDS, E, BL, BLOCK_E)
    if first >= stop:
        return
    i = first + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    s = tl.arange(0, BS)
    i_read = tl.where(i < stop, i, first).to(tl.int64)
    j_read = (j % M).to(tl.int64)
    a_ptrs = X + i_read[:, None] * K + s[None, :]
    weight = W + expert.to(tl.int64) * M * K
    if TRANSPOSE:
        b_ptrs = weight + j_read[None, :] * K + s[:, None]
        b_step = BS
    else:
        b_ptrs = weight + s.to(tl.int64)[:, None] * M + j_read[None, :]
        b_step = BS * M
    acc = tl.zeros((BL, BR), tl.float32)
    for _ in range(tl.cdiv(K, BS)):
        if EVEN:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(s < K)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(s < K)[:, None], other=0.0)
            s += BS
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BS
        b_ptrs += b_step
    out_ptrs = OUT + i.to(tl.int64)[:, None] * M + j[None, :]
    tl.store(out_ptrs, acc.to(OUT.dtype.element_ty), mask=(i < stop)[:, None] & (j < M)[None, :])


@triton.jit
def gathered_gated(  # type: ignore[no-untyped-def]
    X, TOKENS, W, WEIGHTS, OUT, ENDS, row_tiles, F, K, E,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_E: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write OUT (S, F), the gated product of the rows of X (N, K) that TOKENS (S,) names, times WEIGHTS (S,).

    W: (E, 2F, K), gate and up, or (E, F, K). For few rows: the weights of both are read once, and nothing else is
    written. Other arguments: as for `grouped_matmul`.
    """
    i, j0 = tile_origin(tl.program_id(0), row_tiles * BL, F, BL, BR, GROUP)
    expert, first, stop = _rows_of_tile(i // BL, ENDS, E, BL, BLOCK_E)
    if first >= stop:
        return
    i = first + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    s = tl.arange(0, BS)
    token = tl.maximum(tl.load(TOKENS + tl.where(i < stop, i, first)), 0).to(tl.int64)  # padding has weight 0
    weight = W + expert.to(tl.int64) * (2 * F if GATED else F) * K
    x_ptrs = X + token[:, None] * K + s[None, :]
    w_ptrs = weight + (j % F).to(tl.int64)[None, :] * K + s[:, None]
    up_offset = F * K
    gate = tl.zeros((BL, BR), tl.float32)
    up = tl.zeros((BL, BR), tl.float32)
    for _ in range(tl.cdiv(K, BS)):
        if EVEN:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(s < K)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(s < K)[:, None], other=0.0)
        gate = tl.dot(x, w, gate, input_precision=PRECISION)
        if GATED:
            if EVEN:
                w = tl.load(w_ptrs + up_offset)
            else:
                w = tl.load(w_ptrs + up_offset, mask=(s < K)[:, None], other=0.0)
            up = tl.dot(x, w, up, input_precision=PRECISION)
        s += BS
        x_ptrs += BS
        w_ptrs += BS
    hidden, _ = activation(gate, KIND)
    if GATED:
        hidden = hidden * up
    hidden = hidden * tl.load(WEIGHTS + i, mask=i < stop, other=0.0)[:, None]
    out_ptrs = OUT + i.to(tl.int64)[:, None] * F + j[None, :]
    tl.store(out_ptrs, hidden.to(OUT.dtype.element_ty), mask=(i < stop)[:, None] & (j < F)[None, :])


@triton.jit
def grouped_weight_gradient(  # type: ignore[no-untyped-def]
    G, X, OUT, ENDS, M, K,
    BL: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write OUT (E, M, K), one tile per program, for G (S, M) and X (S, K). program_id(1): the expert."""
    expert = tl.program_id(1)
    start = 0
    if expert > 0:
        start = tl.load(ENDS + expert - 1)
    stop = tl.load(ENDS + expert)
    i0, j0 = tile_origin(tl.program_id(0), M, K, BL, BR, GROUP)
    i = i0 + tl.arange(0, BL)
    j = j0 + tl.arange(0, BR)
    i_read = i % M
    j_read = j % K
    acc = tl.zeros((BL, BR), tl.float32)
    for first in range(start, stop, BS):
        row = first + tl.arange(0, BS)
        wide = row.to(tl.int64)
        g = tl.load(G + wide[None, :] * M + i_read[:, None], mask=(row < stop)[None, :], other=0.0)
        x = tl.load(X + wide[:, None] * K + j_read[None, :], mask=(row < stop)[:, None], other=0.0)
        acc = tl.dot(g, x, acc, input_precision=PRECISION)
    out_ptrs = OUT + (expert.to(tl.int64) * M + i[:, None]) * K + j[None, :]
    tl.store(out_ptrs, acc.to(OUT.dtype.element_ty), mask=(i < M)[:, None] & (j < K)[None, :])
