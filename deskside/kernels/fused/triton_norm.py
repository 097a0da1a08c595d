"""Residual add + RMSNorm (+ cast to FP8), forward and backward, and the last step of the weights' gradients.

Forward, bytes per element in BF16: reads 2 tensors, writes 2. In FP8 the normalised values are written as two tensors
of one byte, rows and columns, which is the same traffic as one BF16 tensor.
Backward: one pass reads the output's gradient, the residual and the gradient that reached the residual from above, and
writes their sum's gradient; the weight's gradient is added up in registers and left as one row per program, which
`column_sums` adds up. Atomics would add them in a different order in each run.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import larger, largest_of, note_amax, store_fp8


@triton.jit
def add_norm(  # type: ignore[no-untyped-def]
    RESIDUAL, DELTA, WEIGHT, RESIDUAL_OUT, NORMED, RSTD, N, eps,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """BLOCK_N whole rows per program; BLOCK_D is the power of two that holds D."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    place = rows[:, None] * D + columns[None, :]
    x = tl.load(RESIDUAL + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(DELTA + place, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(RESIDUAL_OUT.dtype.element_ty)
        tl.store(RESIDUAL_OUT + place, rounded, mask=mask)
        x = rounded.to(tl.float32)  # the norm of what is stored, which the backward sees
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    tl.store(RSTD + rows, rstd, mask=rows < N)
    weight = tl.load(WEIGHT + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(NORMED + place, (x * rstd[:, None] * weight[None, :]).to(NORMED.dtype.element_ty), mask=mask)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    RESIDUAL, DELTA, RESIDUAL_OUT, place, mask, HAS_DELTA: tl.constexpr
):
    """residual + delta, float32, as it is rounded and written."""
    if HAS_DELTA:
        x = tl.load(RESIDUAL + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x += tl.load(DELTA + place, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        rounded = x.to(RESIDUAL_OUT.dtype.element_ty)
        tl.store(RESIDUAL_OUT + place, rounded, mask=mask)
        x = rounded.to(tl.float32)
    else:
        x = tl.load(RESIDUAL + place, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def add_norm_fp8(  # type: ignore[no-untyped-def]
    RESIDUAL, DELTA, WEIGHT, RESIDUAL_OUT, ROWS, WORDS, RSTD, SCALE, AMAX, N, eps,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows per program, in two passes over pieces of BLOCK_D columns.

    The second pass reads the sum that the first one wrote, and finds it in the L2 cache as long as residual and delta,
    which are not wanted again, leave first. Without delta RESIDUAL_OUT is RESIDUAL itself.
    """
    words = tl.program_id(0).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    here = words < N // 4
    s0 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    s1 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    s2 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    s3 = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        mask = here[:, None] & (columns < D)[None, :]
        place = words[:, None] * (4 * D) + columns[None, :]
        x = _sum(RESIDUAL, DELTA, RESIDUAL_OUT, place, mask, HAS_DELTA)
        s0 += x * x
        x = _sum(RESIDUAL, DELTA, RESIDUAL_OUT, place + D, mask, HAS_DELTA)
        s1 += x * x
        x = _sum(RESIDUAL, DELTA, RESIDUAL_OUT, place + 2 * D, mask, HAS_DELTA)
        s2 += x * x
        x = _sum(RESIDUAL, DELTA, RESIDUAL_OUT, place + 3 * D, mask, HAS_DELTA)
        s3 += x * x
    s0 = tl.rsqrt(tl.sum(s0, axis=1) / D + eps)
    s1 = tl.rsqrt(tl.sum(s1, axis=1) / D + eps)
    s2 = tl.rsqrt(tl.sum(s2, axis=1) / D + eps)
    s3 = tl.rsqrt(tl.sum(s3, axis=1) / D + eps)
    tl.store(RSTD + words * 4, s0, mask=here)
    tl.store(RSTD + words * 4 + 1, s1, mask=here)
    tl.store(RSTD + words * 4 + 2, s2, mask=here)
    tl.store(RSTD + words * 4 + 3, s3, mask=here)
    if HAS_DELTA:
        tl.debug_barrier()  # a sum may have been written by another thread of this program
    scale = tl.load(SCALE)
    largest = tl.zeros((BLOCK_N // 4, BLOCK_D), tl.float32)
    for start in range(0, D, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        mask = here[:, None] & (columns < D)[None, :]
        place = RESIDUAL_OUT + words[:, None] * (4 * D) + columns[None, :]
        weight = tl.load(WEIGHT + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        a = tl.load(place, mask=mask, other=0.0).to(tl.float32) * s0[:, None] * weight
        b = tl.load(place + D, mask=mask, other=0.0).to(tl.float32) * s1[:, None] * weight
        c = tl.load(place + 2 * D, mask=mask, other=0.0).to(tl.float32) * s2[:, None] * weight
        d = tl.load(place + 3 * D, mask=mask, other=0.0).to(tl.float32) * s3[:, None] * weight
        largest = larger(largest, largest_of(a, b, c, d))
        store_fp8(ROWS, WORDS, a, b, c, d, scale, words, columns, mask, D, N)
    note_amax(AMAX, largest)


@triton.jit
def add_norm_backward(  # type: ignore[no-untyped-def]
    GRAD_NORMED, RESIDUAL_OUT, RSTD, WEIGHT, GRAD_RESIDUAL, GRAD, GRAD_WEIGHT, N, rows_each,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_GRAD_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """`rows_each` rows per program, BLOCK_N at a time. GRAD_WEIGHT: (programs, D), one row of sums each."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    weight = tl.load(WEIGHT + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    grad_weight = tl.zeros((BLOCK_D,), tl.float32)
    start = 0
    while start < rows_each:
        offset = start + tl.arange(0, BLOCK_N)
        rows = (program * rows_each + offset).to(tl.int64)
        here = (rows < N) & (offset < rows_each)
        mask = here[:, None] & (columns < D)[None, :]
        place = rows[:, None] * D + columns[None, :]
        rstd = tl.load(RSTD + rows, mask=here, other=0.0)[:, None]
        normal = tl.load(RESIDUAL_OUT + place, mask=mask, other=0.0).to(tl.float32) * rstd
        dy = tl.load(GRAD_NORMED + place, mask=mask, other=0.0).to(tl.float32)
        grad_weight += tl.sum(dy * normal, axis=0)
        dy = dy * weight
        mean = tl.sum(dy * normal, axis=1)[:, None] / D
        grad = (dy - normal * mean) * rstd
        if HAS_GRAD_RESIDUAL:
            grad += tl.load(GRAD_RESIDUAL + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(GRAD + place, grad.to(GRAD.dtype.element_ty), mask=mask)
        start += BLOCK_N
    tl.store(GRAD_WEIGHT + program * D + columns, grad_weight, mask=columns < D)


@triton.jit
def column_sums(  # type: ignore[no-untyped-def]
    X, OUT, N,
    C: tl.constexpr, FIRST: tl.constexpr, PIECES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """X: (N, PIECES, C), float32. OUT: (1 or 2, C): sums over rows, of the first FIRST pieces and of the rest.

    There are a thousand or so rows of a few hundred columns, so little is read and only the latency of loads matters:
    each program takes few columns and requests a thousand rows at once.
    """
    which = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        mask = (rows < N)[:, None] & (columns < C)[None, :]
        for piece in range(which * FIRST, FIRST + which * (PIECES - FIRST)):
            place = X + rows[:, None] * (PIECES * C) + piece * C + columns[None, :]
            total += tl.load(place, mask=mask, other=0.0)
    tl.store(OUT + which * C + columns, tl.sum(total, axis=0), mask=columns < C)
