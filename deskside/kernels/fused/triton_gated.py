"""activation(gate) * up, or activation(up), forward and backward, in BF16 or cast to FP8 in rows and columns.

Gate and up are the two halves of one row, as the fused projection writes them, and so are their gradients. Bytes per
hidden element in BF16: forward reads 4 and writes 2, backward reads 6 and writes 4.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import note_amax, store_fp8


@triton.jit
def activation(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """(value, slope) at x, float32. KIND: 0 silu, 1 gelu, 2 gelu_new (tanh), 3 relu2."""
    if KIND == 0:
        s = tl.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    if KIND == 1:
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if KIND == 2:
        # tanh(u) = 2 sigmoid(2u) - 1
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    r = tl.maximum(x, 0.0)
    return r * r, 2 * r


@triton.jit
def gated(  # type: ignore[no-untyped-def]
    INPUT, ROWS, COLUMNS, SCALE, AMAX, N, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
    FP8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """INPUT: (N, 2F) gate and up, or (N, F). ROWS: (N, F), and with FP8 also COLUMNS: (F, N)."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    here, there = rows < N, columns < F
    mask = here[:, None] & there[None, :]
    width = 2 * F if GATED else F
    place = INPUT + rows[:, None] * width + columns[None, :]
    hidden, _ = activation(tl.load(place, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        hidden *= tl.load(place + F, mask=mask, other=0.0).to(tl.float32)
    if FP8:
        note_amax(AMAX, hidden)
        store_fp8(ROWS, COLUMNS, hidden, tl.load(SCALE), rows, columns, here, there, F, N, LARGEST)
    else:
        tl.store(ROWS + rows[:, None] * F + columns[None, :], hidden.to(ROWS.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward(  # type: ignore[no-untyped-def]
    GRAD, INPUT, ROWS, COLUMNS, SCALE, AMAX, N, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
    FP8: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """GRAD: (N, F), of the hidden values. ROWS: the input's gradient, (N, 2F) or (N, F), and COLUMNS its transpose."""
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    here, there = rows < N, columns < F
    mask = here[:, None] & there[None, :]
    width = 2 * F if GATED else F
    place = INPUT + rows[:, None] * width + columns[None, :]
    grad = tl.load(GRAD + rows[:, None] * F + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    value, slope = activation(tl.load(place, mask=mask, other=0.0).to(tl.float32), KIND)
    first = grad * slope
    second = grad * value
    if GATED:
        first *= tl.load(place + F, mask=mask, other=0.0).to(tl.float32)
    if FP8:
        scale = tl.load(SCALE)
        note_amax(AMAX, first)
        store_fp8(ROWS, COLUMNS, first, scale, rows, columns, here, there, width, N, LARGEST)
        if GATED:
            note_amax(AMAX, second)
            store_fp8(ROWS, COLUMNS, second, scale, rows, columns + F, here, there, width, N, LARGEST)
    else:
        out = ROWS + rows[:, None] * width + columns[None, :]
        tl.store(out, first.to(ROWS.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(out + F, second.to(ROWS.dtype.element_ty), mask=mask)
