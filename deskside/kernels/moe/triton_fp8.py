"""Casts of sorted rows and of expert weights to E4M3, gathered and transposed on the way. See `fp8_rows`."""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import load_four, magnitude, pack_words, to_fp8


@triton.jit
def _scale_and_inverse(amax):  # type: ignore[no-untyped-def]
    """Return the largest power of two that scales amax to at most 448, and its inverse; see `fp8_rows.scale_for`.

    448 is 1.75 x 2^8. With amax = m x 2^e, the exponent is 8 - e, or 7 - e if m > 1.75. Integers do this in a few
    instructions, where divisions would take longer than the memory traffic.
    """
    bits = amax.to(tl.int32, bitcast=True)
    biased = bits >> 23  # 127 + e; 255 for infinity
    exponent = tl.minimum(262 - biased - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 253)
    exponent = tl.where(bits == 0, 127, tl.where(biased == 255, 0, exponent))
    inverse = tl.where(biased == 255, 255, 254 - exponent)
    return (exponent << 23).to(tl.float32, bitcast=True), (inverse << 23).to(tl.float32, bitcast=True)


@triton.jit
def _experts_of(rows, ENDS, E: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the expert of each sorted row, and whether the row is the first one of its expert."""
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ENDS + experts, mask=experts < E - 1, other=0x7FFFFFFF)[None, :]
    expert = tl.sum((ends <= rows[:, None]).to(tl.int32), axis=1)
    return expert, (tl.sum((ends == rows[:, None]).to(tl.int32), axis=1) > 0) | (rows == 0)


@triton.jit
def cast_rows(  # type: ignore[no-untyped-def]
    X, TOKENS, OUT, INVERSE, K, HAS_TOKENS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Write OUT (S, K) in E4M3 and INVERSE (S,), 1 / the scale of each row, from X (N, K). One program per row."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_TOKENS:
        source = tl.load(TOKENS + row).to(tl.int64)
    amax = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        x = tl.load(X + source * K + columns, mask=(columns < K) & (source >= 0), other=0.0)
        amax = tl.maximum(amax, magnitude(x.to(tl.float32)))
    scale, inverse = _scale_and_inverse(tl.max(amax, axis=0, keep_dims=True))
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        x = tl.load(X + source * K + columns, mask=(columns < K) & (source >= 0), other=0.0).to(tl.float32)
        tl.store(OUT + row * K + columns, to_fp8(x * scale, OUT.dtype.element_ty), mask=columns < K)
    tl.store(INVERSE + row + tl.arange(0, 1), inverse)


@triton.jit
def column_amax(  # type: ignore[no-untyped-def]
    X, TOKENS, ENDS, AMAX, S, K,
    E: tl.constexpr, HAS_TOKENS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Raise AMAX (E, K), which starts at zero, to the largest magnitudes of the columns of each expert's rows."""
    rows = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    source = rows
    if HAS_TOKENS:
        source = tl.load(TOKENS + rows, mask=rows < S, other=-1)
    mask = ((rows < S) & (source >= 0))[:, None] & (columns < K)[None, :]
    x = tl.load(X + source.to(tl.int64)[:, None] * K + columns[None, :], mask=mask, other=0.0)
    x = magnitude(x.to(tl.float32))
    expert, _ = _experts_of(tl.minimum(rows, S - 1), ENDS, E, BLOCK_E)
    for e in range(tl.min(expert, axis=0), tl.max(expert, axis=0) + 1):  # usually one
        amax = tl.max(tl.where((expert == e)[:, None], x, 0.0), axis=0)
        tl.atomic_max(AMAX + e * K + columns, amax, mask=columns < K)


@triton.jit
def cast_columns(  # type: ignore[no-untyped-def]
    X, TOKENS, ENDS, AMAX, WORDS, INVERSE, S, K, column_words, expert_words,
    E: tl.constexpr, HAS_TOKENS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the transpose of X's sorted rows as WORDS of four E4M3 values, and INVERSE (E, K), 1 / the scales.

    column_words: words from one column to the next. expert_words: words to add for each expert before a row's own.
    """
    words = tl.program_id(0).to(tl.int64) * (BLOCK_S // 4) + tl.arange(0, BLOCK_S // 4)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = words < S // 4
    mask = inside[:, None] & (columns < K)[None, :]
    expert, is_first = _experts_of(tl.minimum(words * 4, S - 1), ENDS, E, BLOCK_E)
    expert = expert.to(tl.int64)
    places = expert[:, None] * K + columns[None, :]
    scale, inverse = _scale_and_inverse(tl.load(AMAX + places, mask=mask, other=0.0))
    tl.store(INVERSE + places, inverse, mask=mask & is_first[:, None])
    if HAS_TOKENS:
        a, b, c, d = _gather_four(X, TOKENS, words, inside, columns, K)
    else:
        a, b, c, d = load_four(X + words[:, None] * (4 * K) + columns[None, :], K, mask)
    packed = pack_words(a * scale, b * scale, c * scale, d * scale, tl.float8e4nv)
    ptrs = WORDS + columns.to(tl.int64)[:, None] * column_words + (words + expert * expert_words)[None, :]
    tl.store(ptrs, tl.trans(packed), mask=tl.trans(mask))


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
