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
    exponent = tl.where(bits == 0, 127, tl.where(biased == 255, 0, exponent))
    inverse = tl.where(biased == 255, 255, 254 - exponent)
    return (exponent << 23).to(tl.float32, bitcast=True), (inverse << 23).to(tl.float32, bitcast=True)


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
def _backward(  # type: ignore[no-untyped-def]
    GRAD, INPUT, weight, OUT, HIDDEN, columns, F, KIND: tl.constexpr, GATED: tl.constexpr
):
    """Write the gradients and hidden values of some columns of a row. Arguments: pointers to the row.

    Returns the gradients of gate (or of the only input) and of up (or the same again) in float32, their largest
    magnitude, and the sum that is the gradient of the router's weight.
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
        tl.store(OUT + F + columns, grad_up.to(OUT.dtype.element_ty), mask=mask)
    tl.store(OUT + columns, grad_gate.to(OUT.dtype.element_ty), mask=mask)
    tl.store(HIDDEN + columns, (hidden * weight).to(HIDDEN.dtype.element_ty), mask=mask)
    bits = tl.maximum(magnitude_bits(grad_gate), magnitude_bits(grad_up))
    return grad_gate, grad_up, tl.max(bits, axis=0, keep_dims=True), tl.sum(grad * hidden, axis=0)


@triton.jit
def weighted_gated_backward_fp8(  # type: ignore[no-untyped-def]
    GRAD, INPUT, WEIGHTS, OUT, GRAD_WEIGHTS, HIDDEN, ROWS, INVERSE, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_F: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Like `triton_rows.weighted_gated_backward`, and writes OUT in E4M3 too, ROWS, with INVERSE (S,).

    BLOCK_F, TAIL: as for `weighted_gated_fp8`.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(WEIGHTS + row)
    width = 2 * F if GATED else F
    GRAD, HIDDEN, INPUT, OUT, ROWS = (
        GRAD + row * F,
        HIDDEN + row * F,
        INPUT + row * width,
        OUT + row * width,
        ROWS + row * width,
    )
    columns = tl.arange(0, BLOCK_F)
    gate, up, amax, grad_weight = _backward(GRAD, INPUT, weight, OUT, HIDDEN, columns, F, KIND, GATED)
    if TAIL:
        tail_columns = BLOCK_F + tl.arange(0, TAIL)
        tail_gate, tail_up, more, product = _backward(
            GRAD, INPUT, weight, OUT, HIDDEN, tail_columns, F, KIND, GATED
        )
        amax, grad_weight = tl.maximum(amax, more), grad_weight + product
    scale, inverse = scale_and_inverse(amax)
    tl.store(GRAD_WEIGHTS + row, grad_weight)
    tl.store(INVERSE + row + tl.arange(0, 1), inverse)
    _store_row(ROWS, gate, up, scale, columns, F, GATED)
    if TAIL:
        _store_row(ROWS, tail_gate, tail_up, scale, tail_columns, F, GATED)


@triton.jit
def _store_row(ROWS, gate, up, scale, columns, F, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(ROWS + columns, to_fp8(gate * scale, ROWS.dtype.element_ty), mask=columns < F)
    if GATED:
        tl.store(ROWS + F + columns, to_fp8(up * scale, ROWS.dtype.element_ty), mask=columns < F)


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
