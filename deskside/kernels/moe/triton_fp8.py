"""Casts of sorted rows and of expert weights to E4M3, gathered and transposed on the way. See `fp8_rows`.

A column of a transposed copy has one scale for each expert, so a tile has rows of one expert only
(`triton_grouped.rows_of_tile`), and its scales are one number per column. Programs are numbered along the columns
first: those that run at the same time read whole rows, and not a few bytes of every row, which memory is slow at.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import load_four, pack_words, to_fp8
from deskside.kernels.moe.triton_grouped import rows_of_tile


@triton.jit
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    """Return the bits of |x| as float32: integers in the order of the magnitudes, NaN above infinity."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def scale_and_inverse(bits):  # type: ignore[no-untyped-def]
    """Return the largest power of two that scales a magnitude to at most 448, and its inverse, as `fp8_rows.scale_for`.

    448 is 1.75 x 2^8. For m x 2^e, the exponent is 8 - e, or 7 - e if m > 1.75. Integers do this in a few
    instructions, where divisions would take longer than the memory traffic.
    """
    biased = bits >> 23  # 127 + e; 255 for infinity and NaN
    exponent = tl.minimum(262 - biased - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 253)
    exponent = tl.where(bits == 0, 127, tl.where(biased == 255, 0, exponent))
    inverse = tl.where(biased == 255, 255, 254 - exponent)
    return (exponent << 23).to(tl.float32, bitcast=True), (inverse << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_rows(ROWS, BITS, INVERSE, x, rows, columns, inside, mask, pitch):  # type: ignore[no-untyped-def]
    """Write a tile x, cast with the scales of its rows, and their inverses. BITS, INVERSE: (S,)."""
    scale, inverse = scale_and_inverse(tl.load(BITS + rows, mask=inside, other=0))
    tl.store(INVERSE + rows, inverse, mask=inside)
    ptrs = ROWS + rows.to(tl.int64)[:, None] * pitch + columns[None, :]
    tl.store(ptrs, to_fp8(x * scale[:, None], tl.float8e4nv), mask=mask)


@triton.jit
def store_four_rows(ROWS, BITS, INVERSE, a, b, c, d, words, columns, inside, mask, pitch):  # type: ignore[no-untyped-def]
    """`store_rows` for four tiles (words, columns), of the rows 4 words + 0 to 3."""
    store_rows(ROWS, BITS, INVERSE, a, words * 4, columns, inside, mask, pitch)
    store_rows(ROWS, BITS, INVERSE, b, words * 4 + 1, columns, inside, mask, pitch)
    store_rows(ROWS, BITS, INVERSE, c, words * 4 + 2, columns, inside, mask, pitch)
    store_rows(ROWS, BITS, INVERSE, d, words * 4 + 3, columns, inside, mask, pitch)


@triton.jit
def store_columns(  # type: ignore[no-untyped-def]
    WORDS, BITS, INVERSE, a, b, c, d, words, columns, column_mask, mask, pitch
):
    """Write the transpose of four tiles, of the rows 4 words + 0 to 3, cast with the scales of their columns.

    BITS, INVERSE: (K,), of the tiles' expert. pitch: words from one column to the next.
    """
    scale, inverse = scale_and_inverse(tl.load(BITS + columns, mask=column_mask, other=0))
    tl.store(INVERSE + columns, inverse, mask=column_mask)
    scale = scale[None, :]
    packed = pack_words(a * scale, b * scale, c * scale, d * scale, tl.float8e4nv)
    ptrs = WORDS + columns.to(tl.int64)[:, None] * pitch + words[None, :]
    tl.store(ptrs, tl.trans(packed), mask=tl.trans(mask))


@triton.jit
def cast_rows(  # type: ignore[no-untyped-def]
    X, TOKENS, OUT, INVERSE, COPY, K, HAS_TOKENS: tl.constexpr, HAS_COPY: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Write OUT (S, K) in E4M3 and INVERSE (S,), 1 / the scale of each row, from X (N, K). One program per row.

    COPY (S, K): the rows themselves.
    """
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_TOKENS:
        source = tl.load(TOKENS + row).to(tl.int64)
    amax = tl.zeros((BLOCK_K,), tl.int32)
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        x = tl.load(X + source * K + columns, mask=(columns < K) & (source >= 0), other=0.0)
        amax = tl.maximum(amax, magnitude_bits(x))
        if HAS_COPY:
            tl.store(COPY + row * K + columns, x, mask=columns < K)
    scale, inverse = scale_and_inverse(tl.max(amax, axis=0, keep_dims=True))
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        x = tl.load(X + source * K + columns, mask=(columns < K) & (source >= 0), other=0.0).to(tl.float32)
        tl.store(OUT + row * K + columns, to_fp8(x * scale, OUT.dtype.element_ty), mask=columns < K)
    tl.store(INVERSE + row + tl.arange(0, 1), inverse)


@triton.jit
def sorted_amax(  # type: ignore[no-untyped-def]
    X, TOKENS, ENDS, ROW_BITS, COLUMN_BITS, K, E, HAS_TOKENS: tl.constexpr, HAS_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Raise the largest magnitudes of each expert's columns, COLUMN_BITS (E, K), and of rows, ROW_BITS (S,).

    Both are bits of float32 and start at zero.
    """
    pieces = tl.cdiv(K, BLOCK_K)
    expert, first, stop = rows_of_tile(tl.program_id(0) // pieces, ENDS, E, BLOCK_S, BLOCK_E)
    if first >= stop:
        return
    columns = tl.program_id(0) % pieces * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = first + tl.arange(0, BLOCK_S)
    inside, source = rows < stop, rows
    if HAS_TOKENS:
        source = tl.load(TOKENS + rows, mask=inside, other=-1)
    mask = (inside & (source >= 0))[:, None] & (columns < K)[None, :]
    x = tl.load(X + source.to(tl.int64)[:, None] * K + columns[None, :], mask=mask, other=0.0)
    bits = magnitude_bits(x)
    tl.atomic_max(COLUMN_BITS + expert.to(tl.int64) * K + columns, tl.max(bits, axis=0), mask=columns < K)
    if HAS_ROWS:
        tl.atomic_max(ROW_BITS + rows, tl.max(bits, axis=1), mask=inside)


@triton.jit
def sorted_cast(  # type: ignore[no-untyped-def]
    X, TOKENS, ENDS, ROW_BITS, COLUMN_BITS, ROWS, WORDS, ROW_INVERSE, COLUMN_INVERSE, K, E, pitch, expert_pitch,
    HAS_TOKENS: tl.constexpr, HAS_ROWS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the transpose of X's sorted rows as WORDS of four E4M3 values, and the rows themselves, ROWS (S, K).

    The inverses of their scales are COLUMN_INVERSE (E, K) and ROW_INVERSE (S,). ALIGN: each expert's number of rows is
    a multiple. pitch: values from one column to the next. expert_pitch: values to add for each expert before a row's
    own. Both are multiples of ALIGN. Other arguments: see `sorted_amax`.
    """
    pieces = tl.cdiv(K, BLOCK_K)
    expert, first, stop = rows_of_tile(tl.program_id(0) // pieces, ENDS, E, BLOCK_S, BLOCK_E)
    if first >= stop:
        return
    columns = tl.program_id(0) % pieces * BLOCK_K + tl.arange(0, BLOCK_K)
    column_mask = columns < K
    words = first // ALIGN * (ALIGN // 4) + tl.arange(0, BLOCK_S // 4)
    inside = words < stop // ALIGN * (ALIGN // 4)
    mask = inside[:, None] & column_mask[None, :]
    if HAS_TOKENS:
        a, b, c, d = _gather_four(X, TOKENS, words, inside, columns, K)
    else:
        a, b, c, d = load_four(X + words.to(tl.int64)[:, None] * (4 * K) + columns[None, :], K, mask)
    if HAS_ROWS:
        store_four_rows(ROWS, ROW_BITS, ROW_INVERSE, a, b, c, d, words, columns, inside, mask, K)
    expert = expert.to(tl.int64)
    out, bits, inverse = (
        WORDS + expert * (expert_pitch // 4),
        COLUMN_BITS + expert * K,
        COLUMN_INVERSE + expert * K,
    )
    store_columns(out, bits, inverse, a, b, c, d, words, columns, column_mask, mask, pitch // 4)


@triton.jit
def _gather_four(X, TOKENS, words, inside, columns, K):  # type: ignore[no-untyped-def]
    """Return four tiles as float32: the rows of X that TOKENS names at 4 words + 0 to 3; zeros for padding."""
    a = _gather(X, TOKENS + words * 4, inside, columns, K)
    b = _gather(X, TOKENS + words * 4 + 1, inside, columns, K)
    c = _gather(X, TOKENS + words * 4 + 2, inside, columns, K)
    d = _gather(X, TOKENS + words * 4 + 3, inside, columns, K)
    return a, b, c, d


@triton.jit
def _gather(X, tokens, inside, columns, K):  # type: ignore[no-untyped-def]
    token = tl.load(tokens, mask=inside, other=-1).to(tl.int64)
    mask = (token >= 0)[:, None] & (columns < K)[None, :]
    return tl.load(X + token[:, None] * K + columns[None, :], mask=mask, other=0.0).to(tl.float32)
