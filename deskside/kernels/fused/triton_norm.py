"""Residual add + RMSNorm (+ cast to FP8), forward and backward, and the sums of the norm weights' gradients.

The forward reads two tensors and writes two in BF16. With FP8, the norm is written as two tensors of one byte per
value, rows and columns, which is the traffic of one BF16 tensor. The backward reads the gradient of the norm, the
residual, and the gradient of the residual in one pass, and writes the gradient of residual and delta. Each program sums
the weight's gradient over its rows in registers and writes one row of partial sums; `column_sums` adds these rows.
Atomics would add them in a different order in each run.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import max_abs, max_abs_of_four, store_fp8, update_amax


@triton.jit
def add_norm(  # type: ignore[no-untyped-def]
    RESIDUAL, DELTA, WEIGHT, RESIDUAL_OUT, NORMED, RSTD, N, eps,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """Add and normalize BLOCK_N whole rows per program. BLOCK_D: the next power of two of D."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    offsets = rows[:, None] * D + columns[None, :]
    x = tl.load(RESIDUAL + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(DELTA + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(RESIDUAL_OUT.dtype.element_ty)
        tl.store(RESIDUAL_OUT + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)  # the backward recomputes the norm from the stored, rounded value
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    tl.store(RSTD + rows, rstd, mask=rows < N)
    weight = tl.load(WEIGHT + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(NORMED + offsets, (x * rstd[:, None] * weight[None, :]).to(NORMED.dtype.element_ty), mask=mask)


@triton.jit
def _add(RESIDUAL, DELTA, RESIDUAL_OUT, offsets, mask, HAS_DELTA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return residual + delta in the format of RESIDUAL_OUT."""
    if HAS_DELTA:
        x = tl.load(RESIDUAL + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x += tl.load(DELTA + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    else:
        x = tl.load(RESIDUAL + offsets, mask=mask, other=0.0).to(tl.float32)
    return x.to(RESIDUAL_OUT.dtype.element_ty)


@triton.jit
def _add_square(total, x):  # type: ignore[no-untyped-def]
    """Return total + x**2 in float32."""
    x = x.to(tl.float32)
    return total + x * x


@triton.jit
def add_norm_fp8(  # type: ignore[no-untyped-def]
    RESIDUAL, DELTA, WEIGHT, RESIDUAL_OUT, ROWS, WORDS, RSTD, SCALE, AMAX, N, eps,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DELTA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like `add_norm`, in FP8: writes ROWS and its transpose, in two passes over pieces of BLOCK_D columns.

    The second pass finds the sum that the first one wrote in the L2 cache; residual and delta, which are not read
    again, are therefore loaded as evict_first. Without delta, RESIDUAL_OUT is RESIDUAL. All loads of a piece precede
    its stores, because the compiler does not move a load before a store to memory that may be the same. STAGES - 1
    pieces are loaded ahead.
    """
    words = tl.program_id(0).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    word_mask = words < N // 4
    squares0 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    squares1 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    squares2 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    squares3 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_D)
        mask = word_mask[:, None] & (columns < D)[None, :]
        offsets = words[:, None] * (4 * D) + columns[None, :]
        x0 = _add(RESIDUAL, DELTA, RESIDUAL_OUT, offsets, mask, HAS_DELTA)
        x1 = _add(RESIDUAL, DELTA, RESIDUAL_OUT, offsets + D, mask, HAS_DELTA)
        x2 = _add(RESIDUAL, DELTA, RESIDUAL_OUT, offsets + 2 * D, mask, HAS_DELTA)
        x3 = _add(RESIDUAL, DELTA, RESIDUAL_OUT, offsets + 3 * D, mask, HAS_DELTA)
        if HAS_DELTA:
            tl.store(RESIDUAL_OUT + offsets, x0, mask=mask)
            tl.store(RESIDUAL_OUT + offsets + D, x1, mask=mask)
            tl.store(RESIDUAL_OUT + offsets + 2 * D, x2, mask=mask)
            tl.store(RESIDUAL_OUT + offsets + 3 * D, x3, mask=mask)
        squares0 = _add_square(squares0, x0)
        squares1 = _add_square(squares1, x1)
        squares2 = _add_square(squares2, x2)
        squares3 = _add_square(squares3, x3)
    rstd0 = tl.rsqrt(tl.sum(squares0, axis=1) / D + eps)
    rstd1 = tl.rsqrt(tl.sum(squares1, axis=1) / D + eps)
    rstd2 = tl.rsqrt(tl.sum(squares2, axis=1) / D + eps)
    rstd3 = tl.rsqrt(tl.sum(squares3, axis=1) / D + eps)
    tl.store(RSTD + words * 4, rstd0, mask=word_mask)
    tl.store(RSTD + words * 4 + 1, rstd1, mask=word_mask)
    tl.store(RSTD + words * 4 + 2, rstd2, mask=word_mask)
    tl.store(RSTD + words * 4 + 3, rstd3, mask=word_mask)
    if HAS_DELTA:
        tl.debug_barrier()  # the sums read below may have been written by other threads
    scale = tl.load(SCALE)
    largest = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_D)
        mask = word_mask[:, None] & (columns < D)[None, :]
        ptrs = RESIDUAL_OUT + words[:, None] * (4 * D) + columns[None, :]
        weight = tl.load(WEIGHT + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        a = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) * rstd0[:, None] * weight
        b = tl.load(ptrs + D, mask=mask, other=0.0).to(tl.float32) * rstd1[:, None] * weight
        c = tl.load(ptrs + 2 * D, mask=mask, other=0.0).to(tl.float32) * rstd2[:, None] * weight
        d = tl.load(ptrs + 3 * D, mask=mask, other=0.0).to(tl.float32) * rstd3[:, None] * weight
        largest = max_abs(largest, max_abs_of_four(a, b, c, d))
        store_fp8(ROWS, WORDS, a, b, c, d, scale, words, columns, mask, D, N)
    update_amax(AMAX, largest)


@triton.jit
def add_norm_backward(  # type: ignore[no-untyped-def]
    GRAD_NORMED, RESIDUAL_OUT, RSTD, WEIGHT, GRAD_RESIDUAL, GRAD, GRAD_WEIGHT, N, rows_per_program,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_GRAD_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Process `rows_per_program` rows per program, BLOCK_N at a time. GRAD_WEIGHT: (programs, D), partial sums."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    weight = tl.load(WEIGHT + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    grad_weight = tl.zeros((BLOCK_D,), tl.float32)
    start = 0
    while start < rows_per_program:
        offset = start + tl.arange(0, BLOCK_N)
        rows = (program * rows_per_program + offset).to(tl.int64)
        row_mask = (rows < N) & (offset < rows_per_program)
        mask = row_mask[:, None] & (columns < D)[None, :]
        offsets = rows[:, None] * D + columns[None, :]
        rstd = tl.load(RSTD + rows, mask=row_mask, other=0.0)[:, None]
        normed = tl.load(RESIDUAL_OUT + offsets, mask=mask, other=0.0).to(tl.float32) * rstd
        dy = tl.load(GRAD_NORMED + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_weight += tl.sum(dy * normed, axis=0)
        dy = dy * weight
        mean = tl.sum(dy * normed, axis=1)[:, None] / D
        grad = (dy - normed * mean) * rstd
        if HAS_GRAD_RESIDUAL:
            grad += tl.load(GRAD_RESIDUAL + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(GRAD + offsets, grad.to(GRAD.dtype.element_ty), mask=mask)
        start += BLOCK_N
    tl.store(GRAD_WEIGHT + program * D + columns, grad_weight, mask=columns < D)


@triton.jit
def column_sums(  # type: ignore[no-untyped-def]
    X, OUT, N,
    C: tl.constexpr, FIRST: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum X (N, PIECES, C) float32 over N and the first FIRST pieces, and over the others: OUT (1 or 2, C).

    X has a few thousand rows, so only the latency of loads matters: each program takes few columns and loads a
    thousand rows at once.
    """
    part = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        mask = (rows < N)[:, None] & (columns < C)[None, :]
        for piece in range(part * FIRST, FIRST + part * (PIECES - FIRST)):
            ptrs = X + rows[:, None] * (PIECES * C) + piece * C + columns[None, :]
            total += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(OUT + part * C + columns, tl.sum(total, axis=0), mask=columns < C)
