"""Casts to FP8 of a tensor that exists already, and transposes of FP8, four rows at a time as in `triton_common`.

`cast_fp8` has one scale for the tensor. With a scale per row and, in the transposed copy, a scale per column, it takes
two kernels that read the tensor once each: `row_col_amax` finds the largest magnitude of every row and every column,
`cast_both` casts.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import (
    largest_of,
    load_four,
    magnitude,
    note_amax,
    pack_words,
    rounded_once,
    store_fp8,
)


@triton.jit
def cast_fp8(  # type: ignore[no-untyped-def]
    X, ROWS, WORDS, SCALE, AMAX, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile per program: X (N, K) into ROWS (N, K) and its transpose."""
    words = tl.program_id(1).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (words < N // 4)[:, None] & (columns < K)[None, :]
    place = X + words[:, None] * (4 * K) + columns[None, :]
    a, b, c, d = load_four(place, K, mask)
    store_fp8(ROWS, WORDS, a, b, c, d, tl.load(SCALE), words, columns, mask, K, N)
    note_amax(AMAX, largest_of(a, b, c, d))


@triton.jit
def row_col_amax(X, ROW_AMAX, COLUMN_AMAX, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """X (N, K). ROW_AMAX (N,) and COLUMN_AMAX (K,), float32, zero before. NaN counts as infinity."""
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
    """ROWS (N, K) under ROW_SCALE (N,), and its transpose WORDS (K, N / 4) as int32 under COLUMN_SCALE (K,)."""
    TYPE: tl.constexpr = ROWS.dtype.element_ty
    words = tl.program_id(0).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    here = words < N // 4
    mask = here[:, None] & (columns < K)[None, :]
    scale = tl.load(COLUMN_SCALE + columns, mask=columns < K, other=0.0)[None, :]
    place = words[:, None] * (4 * K) + columns[None, :]
    a, b, c, d = load_four(X + place, K, mask)
    of_row = ROW_SCALE + words * 4
    zero = tl.load(of_row, mask=here, other=0.0)[:, None]
    tl.store(ROWS + place, rounded_once(a * zero, TYPE), mask=mask)
    one = tl.load(of_row + 1, mask=here, other=0.0)[:, None]
    tl.store(ROWS + place + K, rounded_once(b * one, TYPE), mask=mask)
    two = tl.load(of_row + 2, mask=here, other=0.0)[:, None]
    tl.store(ROWS + place + 2 * K, rounded_once(c * two, TYPE), mask=mask)
    three = tl.load(of_row + 3, mask=here, other=0.0)[:, None]
    tl.store(ROWS + place + 3 * K, rounded_once(d * three, TYPE), mask=mask)
    packed = pack_words(a * scale, b * scale, c * scale, d * scale, TYPE)
    turned = WORDS + columns.to(tl.int64)[:, None] * (N // 4) + words[None, :]
    tl.store(turned, tl.trans(packed), mask=tl.trans(mask))


@triton.jit
def transpose(X, WORDS, N, K, stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """X: (N, K) bytes. WORDS: (K, N / 4) int32, `stride` from row to row."""
    words = tl.program_id(0).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (words < N // 4)[:, None] & (columns < K)[None, :]
    place = X + words[:, None] * (4 * K) + columns[None, :]
    packed = tl.load(place, mask=mask, other=0).to(tl.int32)
    packed |= tl.load(place + K, mask=mask, other=0).to(tl.int32) << 8
    packed |= tl.load(place + 2 * K, mask=mask, other=0).to(tl.int32) << 16
    packed |= tl.load(place + 3 * K, mask=mask, other=0).to(tl.int32) << 24
    turned = WORDS + columns.to(tl.int64)[:, None] * stride + words[None, :]
    tl.store(turned, tl.trans(packed), mask=tl.trans(mask))
