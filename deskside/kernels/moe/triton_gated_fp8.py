"""The gate with the router's weight, forward and backward, with its results cast to E4M3. See `fp8_rows`.

The backward takes two kernels that both read the gradient and the gate's input: `gated_backward_amax` finds the largest
magnitudes of rows and columns, `gated_backward_cast` computes the same values again and casts them. This reads and
writes half of what writing them in bfloat16 and casting them would.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import to_fp8
from deskside.kernels.fused.triton_gated import activation, hidden_values
from deskside.kernels.moe.triton_fp8 import magnitude_bits, scale_and_inverse, store_columns, store_four_rows
from deskside.kernels.moe.triton_grouped import rows_of_tile


@triton.jit
def weighted_gated_fp8(  # type: ignore[no-untyped-def]
    INPUT, WEIGHTS, OUT, INVERSE, S, F, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Write OUT (S, F) in E4M3 and INVERSE (S,), 1 / the scale of each row, for INPUT (S, 2F), gate and up, or (S, F).

    One program per row. Rows longer than BLOCK_F are computed twice.
    """
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    weight = tl.load(WEIGHTS + rows)[:, None]
    if F <= BLOCK_F:
        columns = tl.arange(0, BLOCK_F)
        mask = (rows < S)[:, None] & (columns < F)[None, :]
        hidden = hidden_values(INPUT, rows, columns, mask, F, KIND, GATED) * weight
        scale, inverse = scale_and_inverse(tl.max(magnitude_bits(hidden), axis=1))
        out = to_fp8(hidden * scale[:, None], OUT.dtype.element_ty)
        tl.store(OUT + rows[:, None] * F + columns[None, :], out, mask=mask)
    else:
        amax = tl.zeros((1, BLOCK_F), tl.int32)
        for first in range(0, F, BLOCK_F):
            columns = first + tl.arange(0, BLOCK_F)
            mask = (rows < S)[:, None] & (columns < F)[None, :]
            hidden = hidden_values(INPUT, rows, columns, mask, F, KIND, GATED) * weight
            amax = tl.maximum(amax, magnitude_bits(hidden))
        scale, inverse = scale_and_inverse(tl.max(amax, axis=1))
        for first in range(0, F, BLOCK_F):
            columns = first + tl.arange(0, BLOCK_F)
            mask = (rows < S)[:, None] & (columns < F)[None, :]
            hidden = hidden_values(INPUT, rows, columns, mask, F, KIND, GATED) * weight
            out = to_fp8(hidden * scale[:, None], OUT.dtype.element_ty)
            tl.store(OUT + rows[:, None] * F + columns[None, :], out, mask=mask)
    tl.store(INVERSE + rows, inverse)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    GRAD, INPUT, WEIGHTS, rows, columns, inside, mask, F, KIND: tl.constexpr, GATED: tl.constexpr
):
    """Return a tile of the gradients of gate (or of the only input) and of up, of the hidden values, all times the
    router's weight, and of the products whose sum is the gradient of that weight; float32."""
    width = 2 * F if GATED else F
    rows = rows.to(tl.int64)
    ptrs = INPUT + rows[:, None] * width + columns[None, :]
    grad = tl.load(GRAD + rows[:, None] * F + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHTS + rows, mask=inside, other=0.0)[:, None]
    value, slope = activation(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), KIND)
    weighted = grad * weight
    if GATED:
        up = tl.load(ptrs + F, mask=mask, other=0.0).to(tl.float32)
        return weighted * slope * up, weighted * value, value * up * weight, grad * value * up
    return weighted * slope, weighted, value * weight, grad * value


@triton.jit
def gated_backward_rows(  # type: ignore[no-untyped-def]
    GRAD, INPUT, WEIGHTS, OUT, GRAD_WEIGHTS, HIDDEN, ROWS, INVERSE, S, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Like `triton_rows.weighted_gated_backward`, and writes OUT in E4M3 too, ROWS, with INVERSE (S,).

    F is at most BLOCK_F.
    """
    rows = tl.program_id(0) + tl.arange(0, 1)
    inside = rows < S
    columns = tl.arange(0, BLOCK_F)
    mask = inside[:, None] & (columns < F)[None, :]
    gate, up, hidden, products = _backward(GRAD, INPUT, WEIGHTS, rows, columns, inside, mask, F, KIND, GATED)
    tl.store(GRAD_WEIGHTS + rows, tl.sum(products, axis=1), mask=inside)
    rows = rows.to(tl.int64)
    tl.store(HIDDEN + rows[:, None] * F + columns[None, :], hidden.to(HIDDEN.dtype.element_ty), mask=mask)
    amax = magnitude_bits(gate)
    place = rows[:, None] * (2 * F if GATED else F) + columns[None, :]
    tl.store(OUT + place, gate.to(OUT.dtype.element_ty), mask=mask)
    if GATED:
        amax = tl.maximum(amax, magnitude_bits(up))
        tl.store(OUT + place + F, up.to(OUT.dtype.element_ty), mask=mask)
    scale, inverse = scale_and_inverse(tl.max(amax, axis=1))
    tl.store(INVERSE + rows, inverse, mask=inside)
    tl.store(ROWS + place, to_fp8(gate * scale[:, None], ROWS.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(ROWS + place + F, to_fp8(up * scale[:, None], ROWS.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward_amax(  # type: ignore[no-untyped-def]
    GRAD, INPUT, WEIGHTS, ENDS, GRAD_WEIGHTS, ROW_BITS, COLUMN_BITS, HIDDEN_BITS, F, E,
    KIND: tl.constexpr, GATED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write GRAD_WEIGHTS (S,) and the largest magnitudes of the gradient of INPUT, of its rows, ROW_BITS (S,), and of
    each expert's columns, COLUMN_BITS (E, 2F) or (E, F), and of the columns of the hidden values, HIDDEN_BITS (E, F).

    Those of columns start at zero. One program per tile of rows.
    """
    expert, first, stop = rows_of_tile(tl.program_id(0), ENDS, E, BLOCK_S, BLOCK_E)
    if first >= stop:
        return
    rows = first + tl.arange(0, BLOCK_S)
    inside = rows < stop
    width = 2 * F if GATED else F
    expert = expert.to(tl.int64)
    column_bits, hidden_bits = COLUMN_BITS + expert * width, HIDDEN_BITS + expert * F
    amax = tl.zeros((BLOCK_S, BLOCK_F), tl.int32)
    grad_weight = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    for start in range(0, F, BLOCK_F):
        columns = start + tl.arange(0, BLOCK_F)
        column_mask = columns < F
        mask = inside[:, None] & column_mask[None, :]
        gate, up, hidden, products = _backward(
            GRAD, INPUT, WEIGHTS, rows, columns, inside, mask, F, KIND, GATED
        )
        grad_weight += products
        tl.atomic_max(hidden_bits + columns, tl.max(magnitude_bits(hidden), axis=0), mask=column_mask)
        bits = magnitude_bits(gate)
        tl.atomic_max(column_bits + columns, tl.max(bits, axis=0), mask=column_mask)
        amax = tl.maximum(amax, bits)
        if GATED:
            bits = magnitude_bits(up)
            tl.atomic_max(column_bits + F + columns, tl.max(bits, axis=0), mask=column_mask)
            amax = tl.maximum(amax, bits)
    tl.store(GRAD_WEIGHTS + rows, tl.sum(grad_weight, axis=1), mask=inside)
    tl.store(ROW_BITS + rows, tl.max(amax, axis=1), mask=inside)


@triton.jit
def gated_backward_cast(  # type: ignore[no-untyped-def]
    GRAD, INPUT, WEIGHTS, ENDS, ROW_BITS, COLUMN_BITS, HIDDEN_BITS,
    ROWS, WORDS, HIDDEN_WORDS, ROW_INVERSE, COLUMN_INVERSE, HIDDEN_INVERSE, S, F, E,
    KIND: tl.constexpr, GATED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the gradient of INPUT in E4M3, as it is, ROWS, and transposed, WORDS, and the transposed hidden values,
    HIDDEN_WORDS, with the inverses of their scales, from the magnitudes of `gated_backward_amax`.

    ALIGN: each expert's number of rows is a multiple.
    """
    pieces = tl.cdiv(F, BLOCK_F)
    expert, first, stop = rows_of_tile(tl.program_id(0) // pieces, ENDS, E, BLOCK_S, BLOCK_E)
    if first >= stop:
        return
    columns = tl.program_id(0) % pieces * BLOCK_F + tl.arange(0, BLOCK_F)
    column_mask = columns < F
    words = first // ALIGN * (ALIGN // 4) + tl.arange(0, BLOCK_S // 4)
    inside = words < stop // ALIGN * (ALIGN // 4)
    mask = inside[:, None] & column_mask[None, :]
    a, e, i, _ = _backward(GRAD, INPUT, WEIGHTS, words * 4, columns, inside, mask, F, KIND, GATED)
    b, f, j, _ = _backward(GRAD, INPUT, WEIGHTS, words * 4 + 1, columns, inside, mask, F, KIND, GATED)
    c, g, k, _ = _backward(GRAD, INPUT, WEIGHTS, words * 4 + 2, columns, inside, mask, F, KIND, GATED)
    d, h, l, _ = _backward(GRAD, INPUT, WEIGHTS, words * 4 + 3, columns, inside, mask, F, KIND, GATED)  # noqa: E741
    expert, width, pitch = expert.to(tl.int64), 2 * F if GATED else F, S // 4
    bits, inverse = COLUMN_BITS + expert * width, COLUMN_INVERSE + expert * width
    hidden_bits, hidden_inverse = HIDDEN_BITS + expert * F, HIDDEN_INVERSE + expert * F
    store_columns(
        HIDDEN_WORDS, hidden_bits, hidden_inverse, i, j, k, l, words, columns, column_mask, mask, pitch
    )
    store_four_rows(ROWS, ROW_BITS, ROW_INVERSE, a, b, c, d, words, columns, inside, mask, width)
    store_columns(WORDS, bits, inverse, a, b, c, d, words, columns, column_mask, mask, pitch)
    if GATED:
        store_four_rows(ROWS + F, ROW_BITS, ROW_INVERSE, e, f, g, h, words, columns, inside, mask, width)
        up = WORDS + F.to(tl.int64) * pitch
        store_columns(up, bits + F, inverse + F, e, f, g, h, words, columns, column_mask, mask, pitch)
