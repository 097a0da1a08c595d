"""Casts of a tensor to FP8, and transposes of FP8 matrices, four rows at a time as in `triton_common`.

`cast_fp8` has one scale for the tensor. A cast with a scale per row, and per column in the transposed copy, takes two
kernels that each read the tensor once: `row_col_amax` finds the largest magnitudes, `cast_both` casts.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import (
    load_four,
    magnitude,
    max_abs_of_four,
    pack_words,
    store_fp8,
    to_fp8,
    update_amax,
)


@triton.jit
def cast_fp8(  # type: ignore[no-untyped-def]
    X, ROWS, WORDS, SCALE, AMAX, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast X (N, K) to ROWS (N, K) and its transpose WORDS (K, N / 4) as int32, one tile per program."""
    words = tl.program_id(1).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (words < N // 4)[:, None] & (columns < K)[None, :]
    ptrs = X + words[:, None] * (4 * K) + columns[None, :]
    a, b, c, d = load_four(ptrs, K, mask)
    store_fp8(ROWS, WORDS, a, b, c, d, tl.load(SCALE), words, columns, mask, K, N)
    update_amax(AMAX, max_abs_of_four(a, b, c, d))


@triton.jit
def row_col_amax(X, ROW_AMAX, COLUMN_AMAX, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """X (N, K) -> ROW_AMAX (N,) and COLUMN_AMAX (K,), float32, which must start at zero. NaN counts as infinity."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < N)[:, None] & (columns < K)[None, :]
    x = magnitude(tl.load(X + rows[:, None] * K + columns[None, :], mask=mask, other=0.0).to(tl.float32))
    tl.atomic_max(ROW_AMAX + rows, tl.max(x, axis=1), mask=rows < N)
    tl.atomic_max(COLUMN_AMAX + columns, tl.max(x, axis=0), mask=columns < K)


@triton.jit
def cast_both(  # type: ignore[no-untyped-def]
    X, ROWS, WORDS, ROW_SCALE, COLUMN_SCALE, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast X (N, K) to ROWS (N, K) with ROW_SCALE (N,), and to WORDS (K, N / 4) as int32 with COLUMN_SCALE (K,)."""
    TYPE: tl.constexpr = ROWS.dtype.element_ty
    words = tl.program_id(0).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    word_mask = words < N // 4
    mask = word_mask[:, None] & (columns < K)[None, :]
    column_scale = tl.load(COLUMN_SCALE + columns, mask=columns < K, other=0.0)[None, :]
    offsets = words[:, None] * (4 * K) + columns[None, :]
    a, b, c, d = load_four(X + offsets, K, mask)
    row_scale_ptrs = ROW_SCALE + words * 4
    scale_a = tl.load(row_scale_ptrs, mask=word_mask, other=0.0)[:, None]
    tl.store(ROWS + offsets, to_fp8(a * scale_a, TYPE), mask=mask)
    scale_b = tl.load(row_scale_ptrs + 1, mask=word_mask, other=0.0)[:, None]
    tl.store(ROWS + offsets + K, to_fp8(b * scale_b, TYPE), mask=mask)
    scale_c = tl.load(row_scale_ptrs + 2, mask=word_mask, other=0.0)[:, None]
    tl.store(ROWS + offsets + 2 * K, to_fp8(c * scale_c, TYPE), mask=mask)
    scale_d = tl.load(row_scale_ptrs + 3, mask=word_mask, other=0.0)[:, None]
    tl.store(ROWS + offsets + 3 * K, to_fp8(d * scale_d, TYPE), mask=mask)
    packed = pack_words(a * column_scale, b * column_scale, c * column_scale, d * column_scale, TYPE)
    out_ptrs = WORDS + columns.to(tl.int64)[:, None] * (N // 4) + words[None, :]
    tl.store(out_ptrs, tl.trans(packed), mask=tl.trans(mask))


@triton.jit
def transpose(X, WORDS, N, K, stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Transpose X, (N, K) bytes, into WORDS, (K, N / 4) int32 with the row stride `stride`."""
    words = tl.program_id(0).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (words < N // 4)[:, None] & (columns < K)[None, :]
    ptrs = X + words[:, None] * (4 * K) + columns[None, :]
    packed = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
    packed |= tl.load(ptrs + K, mask=mask, other=0).to(tl.int32) << 8
    packed |= tl.load(ptrs + 2 * K, mask=mask, other=0).to(tl.int32) << 16
    packed |= tl.load(ptrs + 3 * K, mask=mask, other=0).to(tl.int32) << 24
    out_ptrs = WORDS + columns.to(tl.int64)[:, None] * stride + words[None, :]
    tl.store(out_ptrs, tl.trans(packed), mask=tl.trans(mask))
