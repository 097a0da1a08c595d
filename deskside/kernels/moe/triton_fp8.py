"""Casts of sorted rows, of the gate's results, and of expert weights to E4M3. See `fp8_rows`.

Each row is cast by one program, which finds the largest magnitude first and then holds the row or reads it again.
Columns of weights take two kernels. Their programs are numbered along the columns first: those that run at the same
time read whole rows, and not a few bytes of every row, which would be slow.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import load_four, pack_words, to_fp8
from deskside.kernels.fused.triton_gated import activation


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
    exponent = tl.where(biased == 255, 0, exponent)
    inverse = tl.where(biased == 255, 255, 254 - exponent)
    return (exponent << 23).to(tl.float32, bitcast=True), (inverse << 23).to(tl.float32, bitcast=True)


@triton.jit
def _row_scale(ROW, K, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale of the row of K values at the pointer ROW, and its inverse, as tensors of one value."""
    amax = tl.zeros((BLOCK_K,), tl.int32)
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        amax = tl.maximum(amax, magnitude_bits(tl.load(ROW + columns, mask=columns < K, other=0.0)))
    return scale_and_inverse(tl.max(amax, axis=0, keep_dims=True))


@triton.jit
def cast_rows(X, OUT, INVERSE, K, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write OUT (N, K) in E4M3 and INVERSE (N,), 1 / the scale of each row, from X (N, K). One program per row."""
    row = tl.program_id(0).to(tl.int64)
    scale, inverse = _row_scale(X + row * K, K, BLOCK_K)
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        x = tl.load(X + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
        tl.store(OUT + row * K + columns, to_fp8(x * scale, OUT.dtype.element_ty), mask=columns < K)
    tl.store(INVERSE + row + tl.arange(0, 1), inverse)


@triton.jit
def dispatch_fp8(  # type: ignore[no-untyped-def]
    X, SLOTS, TOKENS, OUT, INVERSE, N, S, K,
    CHOICES: tl.constexpr, BLOCK_K: tl.constexpr, PADDED_ROWS: tl.constexpr,
):  # fmt: skip
    """Write each row of X (N, K) in E4M3 to the CHOICES rows of OUT (S, K) that SLOTS names, with INVERSE (S,).

    One program per token, and after these one per PADDED_ROWS rows of OUT, which writes the padding among them.
    """
    token = tl.program_id(0).to(tl.int64)
    if token < N:
        scale, inverse = _row_scale(X + token * K, K, BLOCK_K)
        for choice in tl.static_range(CHOICES):
            slot = tl.load(SLOTS + token * CHOICES + choice).to(tl.int64)
            tl.store(INVERSE + slot + tl.arange(0, 1), inverse)
        for first in range(0, K, BLOCK_K):
            columns = first + tl.arange(0, BLOCK_K)
            x = tl.load(X + token * K + columns, mask=columns < K, other=0.0).to(tl.float32)
            out = to_fp8(x * scale, OUT.dtype.element_ty)
            for choice in tl.static_range(CHOICES):
                slot = tl.load(SLOTS + token * CHOICES + choice).to(tl.int64)
                tl.store(OUT + slot * K + columns, out, mask=columns < K)
    else:
        _, inverse = scale_and_inverse(tl.zeros((1,), tl.int32))
        start = (token - N) * PADDED_ROWS
        rows = start + tl.arange(0, PADDED_ROWS)
        # Most programs find no padding, and must not look at one row after the other to know.
        if tl.min(tl.load(TOKENS + rows, mask=rows < S, other=0), axis=0) < 0:
            for row in range(start, tl.minimum(start + PADDED_ROWS, S)):
                if tl.load(TOKENS + row) < 0:
                    tl.store(INVERSE + row + tl.arange(0, 1), inverse)
                    for first in range(0, K, BLOCK_K):
                        columns = first + tl.arange(0, BLOCK_K)
                        zeros = to_fp8(tl.zeros((BLOCK_K,), tl.float32), OUT.dtype.element_ty)
                        tl.store(OUT + row * K + columns, zeros, mask=columns < K)


@triton.jit
def _hidden(  # type: ignore[no-untyped-def]
    INPUT, weight, columns, F, KIND: tl.constexpr, GATED: tl.constexpr
):
    """Return hidden values of a row, times the router's weight, in float32. INPUT: pointer to the row."""
    hidden, _ = activation(tl.load(INPUT + columns, mask=columns < F, other=0.0).to(tl.float32), KIND)
    if GATED:
        hidden *= tl.load(INPUT + F + columns, mask=columns < F, other=0.0).to(tl.float32)
    return hidden * weight


@triton.jit
def weighted_gated_fp8(  # type: ignore[no-untyped-def]
    INPUT, WEIGHTS, OUT, INVERSE, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_F: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Write OUT (S, F) in E4M3 and INVERSE (S,), 1 / the scale of each row, for INPUT (S, 2F), gate and up, or (S, F).

    One program per row, which it holds in two pieces of BLOCK_F and TAIL columns; TAIL may be 0.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(WEIGHTS + row)
    INPUT += row * (2 * F if GATED else F)
    columns = tl.arange(0, BLOCK_F)
    hidden = _hidden(INPUT, weight, columns, F, KIND, GATED)
    amax = tl.max(magnitude_bits(hidden), axis=0, keep_dims=True)
    if TAIL:
        tail_columns = BLOCK_F + tl.arange(0, TAIL)
        tail = _hidden(INPUT, weight, tail_columns, F, KIND, GATED)
        amax = tl.maximum(amax, tl.max(magnitude_bits(tail), axis=0, keep_dims=True))
    scale, inverse = scale_and_inverse(amax)
    tl.store(INVERSE + row + tl.arange(0, 1), inverse)
    OUT += row * F
    tl.store(OUT + columns, to_fp8(hidden * scale, OUT.dtype.element_ty), mask=columns < F)
    if TAIL:
        tl.store(OUT + tail_columns, to_fp8(tail * scale, OUT.dtype.element_ty), mask=tail_columns < F)


@triton.jit
def _max_max_sum(bits, hidden_bits, product, other_bits, other_hidden_bits, other_product):  # type: ignore[no-untyped-def]
    return (
        tl.maximum(bits, other_bits),
        tl.maximum(hidden_bits, other_hidden_bits),
        product + other_product,
    )


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    GRAD, INPUT, weight, columns, F, KIND: tl.constexpr, GATED: tl.constexpr
):
    """Return the results of some columns of a row in float32. GRAD, INPUT: pointers to the row.

    They are the gradients of gate (or of the only input) and of up (or the same again), the hidden values times the
    router's weight, the largest magnitudes of the gradients and of the hidden values, and the sum that is the gradient
    of the router's weight. The last three are reduced together: each reduction waits for all threads.
    """
    mask = columns < F
    grad = tl.load(GRAD + columns, mask=mask, other=0.0).to(tl.float32)
    hidden, slope = activation(tl.load(INPUT + columns, mask=mask, other=0.0).to(tl.float32), KIND)
    weighted = grad * weight
    grad_gate = weighted * slope
    grad_up = grad_gate
    if GATED:
        up = tl.load(INPUT + F + columns, mask=mask, other=0.0).to(tl.float32)
        grad_gate *= up
        grad_up = weighted * hidden
        hidden *= up
    product = grad * hidden
    hidden *= weight
    bits = tl.maximum(magnitude_bits(grad_gate), magnitude_bits(grad_up))
    found = bits, magnitude_bits(hidden), product
    bits, hidden_bits, grad_weight = tl.reduce(found, axis=0, keep_dims=True, combine_fn=_max_max_sum)
    return grad_gate, grad_up, hidden, bits, hidden_bits, grad_weight


@triton.jit
def weighted_gated_backward_fp8(  # type: ignore[no-untyped-def]
    GRAD, INPUT, WEIGHTS, ROWS, INVERSE, GRAD_WEIGHTS, HIDDEN, HIDDEN_INVERSE, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_F: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Like `triton_rows.weighted_gated_backward`, with the gradient of INPUT as ROWS (S, 2F) or (S, F) in E4M3 with
    INVERSE (S,), and HIDDEN (S, F) in E4M3 with HIDDEN_INVERSE (S,).

    BLOCK_F, TAIL: as for `weighted_gated_fp8`.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(WEIGHTS + row)
    width = 2 * F if GATED else F
    GRAD, HIDDEN, INPUT, ROWS = GRAD + row * F, HIDDEN + row * F, INPUT + row * width, ROWS + row * width
    columns = tl.arange(0, BLOCK_F)
    gate, up, hidden, amax, hidden_amax, grad_weight = _backward(GRAD, INPUT, weight, columns, F, KIND, GATED)
    if TAIL:
        tail_columns = BLOCK_F + tl.arange(0, TAIL)
        tail_gate, tail_up, tail_hidden, more, hidden_more, product = _backward(
            GRAD, INPUT, weight, tail_columns, F, KIND, GATED
        )
        amax, grad_weight = tl.maximum(amax, more), grad_weight + product
        hidden_amax = tl.maximum(hidden_amax, hidden_more)
    scale, inverse = scale_and_inverse(amax)
    hidden_scale, hidden_inverse = scale_and_inverse(hidden_amax)
    tl.store(GRAD_WEIGHTS + row + tl.arange(0, 1), grad_weight)
    tl.store(INVERSE + row + tl.arange(0, 1), inverse)
    tl.store(HIDDEN_INVERSE + row + tl.arange(0, 1), hidden_inverse)
    _store_row(ROWS, gate, up, scale, columns, F, GATED)
    tl.store(HIDDEN + columns, to_fp8(hidden * hidden_scale, HIDDEN.dtype.element_ty), mask=columns < F)
    if TAIL:
        _store_row(ROWS, tail_gate, tail_up, scale, tail_columns, F, GATED)
        hidden = to_fp8(tail_hidden * hidden_scale, HIDDEN.dtype.element_ty)
        tl.store(HIDDEN + tail_columns, hidden, mask=tail_columns < F)


@triton.jit
def _store_row(ROWS, gate, up, scale, columns, F, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(ROWS + columns, to_fp8(gate * scale, ROWS.dtype.element_ty), mask=columns < F)
    if GATED:
        tl.store(ROWS + F + columns, to_fp8(up * scale, ROWS.dtype.element_ty), mask=columns < F)


@triton.jit
def scale_of_experts(  # type: ignore[no-untyped-def]
    INVERSE, ENDS, INVERSE_E, FACTOR, IS_CAST: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Write INVERSE_E (E,), the largest of each expert's INVERSE (S,), and the FACTOR (S,) that gives a row that scale.

    FACTOR is 1 / INVERSE_E or, for rows that were cast with their own scales (IS_CAST), INVERSE / INVERSE_E. One
    program per expert.
    """
    expert = tl.program_id(0)
    start = tl.where(expert > 0, tl.load(ENDS + tl.maximum(expert - 1, 0)), 0)
    end = tl.load(ENDS + expert)
    rows = tl.arange(0, BLOCK_S)
    largest = tl.zeros((BLOCK_S,), tl.int32)  # bits of numbers that are not negative have their order
    for first in range(start, end, BLOCK_S):
        inverse = tl.load(INVERSE + first + rows, mask=first + rows < end, other=0.0)
        largest = tl.maximum(largest, inverse.to(tl.int32, bitcast=True))
    bits = tl.max(largest, axis=0)
    inverse_of_expert = bits.to(tl.float32, bitcast=True)
    tl.store(INVERSE_E + expert, inverse_of_expert)
    # Of a power of two, the exponent changes its sign. Infinity becomes 0.
    scale = tl.maximum((254 << 23) - bits, 0).to(tl.float32, bitcast=True)
    for first in range(start, end, BLOCK_S):
        mask = first + rows < end
        if IS_CAST:
            inverse = tl.load(INVERSE + first + rows, mask=mask, other=0.0)
            tl.store(FACTOR + first + rows, inverse / inverse_of_expert, mask=mask)
        else:
            tl.store(FACTOR + first + rows, scale, mask=mask)


@triton.jit
def transpose_rows(  # type: ignore[no-untyped-def]
    X, TOKENS, FACTOR, WORDS, S, K, groups,
    HAS_TOKENS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the transpose of rows times FACTOR (S,) as WORDS (K, S / 4) of four E4M3 values.

    The rows are X (S, K), or those of X (N, K) that TOKENS (S,) names, with zeros for -1. Row blocks are divided into
    `groups`, of which each takes its turn. Tokens of an expert are in order, so if there are as many groups as experts,
    programs that run at the same time read the same tokens for several experts, and find them in the L2 cache.
    """
    pieces, blocks = tl.cdiv(K, BLOCK_K), tl.cdiv(S, BLOCK_S)
    number = tl.program_id(0) // pieces
    block = number % groups * tl.cdiv(blocks, groups) + number // groups
    words = (block * (BLOCK_S // 4) + tl.arange(0, BLOCK_S // 4)).to(tl.int64)
    columns = tl.program_id(0) % pieces * BLOCK_K + tl.arange(0, BLOCK_K)
    word_mask = words < S // 4
    mask = word_mask[:, None] & (columns < K)[None, :]
    p, q, r, s = load_four(FACTOR + words * 4, 1, word_mask)
    if HAS_TOKENS:
        a = _token_rows(X, TOKENS + words * 4, columns, K, word_mask, mask)
        b = _token_rows(X, TOKENS + words * 4 + 1, columns, K, word_mask, mask)
        c = _token_rows(X, TOKENS + words * 4 + 2, columns, K, word_mask, mask)
        d = _token_rows(X, TOKENS + words * 4 + 3, columns, K, word_mask, mask)
    else:
        a, b, c, d = load_four(X + (words * 4)[:, None] * K + columns[None, :], K, mask)
    packed = pack_words(a * p[:, None], b * q[:, None], c * r[:, None], d * s[:, None], tl.float8e4nv)
    places = columns[:, None].to(tl.int64) * (S // 4) + words[None, :]
    tl.store(WORDS + places, tl.trans(packed), mask=tl.trans(mask))


@triton.jit
def _token_rows(X, TOKENS, columns, K, word_mask, mask):  # type: ignore[no-untyped-def]
    """Load some columns of the rows of X (N, K) that the pointers TOKENS name, as float32. Zeros for -1."""
    tokens = tl.load(TOKENS, mask=word_mask, other=-1).to(tl.int64)[:, None]
    return tl.load(X + tokens * K + columns[None, :], mask=mask & (tokens >= 0), other=0.0).to(tl.float32)


@triton.jit
def column_amax(X, BITS, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise BITS (E, K), which starts at zero, to `magnitude_bits` of the largest values of X's (E, M, K) columns."""
    pieces, expert = tl.cdiv(K, BLOCK_K), tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) // pieces * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % pieces * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    x = tl.load(X + (expert * M + rows)[:, None] * K + columns[None, :], mask=mask, other=0.0)
    tl.atomic_max(BITS + expert * K + columns, tl.max(magnitude_bits(x), axis=0), mask=columns < K)


@triton.jit
def cast_columns(  # type: ignore[no-untyped-def]
    X, BITS, WORDS, INVERSE, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Write the transpose of each expert's X (E, M, K) as WORDS (E, K, M / 4) of four E4M3 values, and INVERSE (E, K),
    1 / the scale of each column, from the BITS of `column_amax`."""
    pieces, expert = tl.cdiv(K, BLOCK_K), tl.program_id(1).to(tl.int64)
    words = tl.program_id(0) // pieces * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    columns = tl.program_id(0) % pieces * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (words < M // 4)[:, None] & (columns < K)[None, :]
    places = expert * K + columns
    scale, inverse = scale_and_inverse(tl.load(BITS + places, mask=columns < K, other=0))
    tl.store(INVERSE + places, inverse, mask=columns < K)  # by every tile of a column, with the same value
    a, b, c, d = load_four(X + (expert * M + words * 4)[:, None] * K + columns[None, :], K, mask)
    scale = scale[None, :]
    packed = pack_words(a * scale, b * scale, c * scale, d * scale, tl.float8e4nv)
    tl.store(WORDS + places[:, None] * (M // 4) + words[None, :], tl.trans(packed), mask=tl.trans(mask))
