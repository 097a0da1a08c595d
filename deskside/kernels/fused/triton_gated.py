"""activation(gate) * up, or activation(up), forward and backward, in BF16 or cast to FP8 in rows and columns.

Gate and up are the two halves of a row of the fused projection's output; their gradients have the same layout. Bytes
per hidden element in BF16, with a gate: forward reads 4 and writes 2, backward reads 6 and writes 4.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import (
    INTERPRETED,
    max_abs,
    max_abs_of_four,
    store_fp8,
    update_amax,
)

_SIGMOID = """
{
.reg .f32 t;
mul.f32 t, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 t, t;
add.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 $0, t;
}
"""
SIGMOID = tl.constexpr(_SIGMOID)  # 1 / (1 + 2^(-x log2 e))


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """Sigmoid in four instructions, which flush results below 1e-38 to 0. Triton's takes thirteen."""
    if INTERPRETED:
        result = tl.sigmoid(x)
    else:
        result = tl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def activation(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the activation and its derivative at x, float32. KIND: 0 silu, 1 gelu, 2 gelu_new (tanh), 3 relu2."""
    if KIND == 0:
        s = sigmoid(x)
        return x * s, s + x * s * (1 - s)
    if KIND == 1:
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if KIND == 2:
        # tanh(u) = 2 sigmoid(2u) - 1
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        t = 2 * sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope
    r = tl.where(x < 0.0, 0.0, x)  # a maximum would turn NaN into 0
    return r * r, 2 * r


@triton.jit
def gated(  # type: ignore[no-untyped-def]
    INPUT, OUT, N, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write OUT (N, F) for INPUT (N, 2F), gate and up, or INPUT (N, F)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (rows < N)[:, None] & (columns < F)[None, :]
    hidden = hidden_values(INPUT, rows, columns, mask, F, KIND, GATED)
    tl.store(OUT + rows[:, None] * F + columns[None, :], hidden.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def gated_fp8(  # type: ignore[no-untyped-def]
    INPUT, ROWS, WORDS, SCALE, AMAX, N, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Like `gated`, in FP8: writes ROWS (N, F) and its transpose."""
    words = tl.program_id(1).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (words < N // 4)[:, None] & (columns < F)[None, :]
    a = hidden_values(INPUT, words * 4, columns, mask, F, KIND, GATED)
    b = hidden_values(INPUT, words * 4 + 1, columns, mask, F, KIND, GATED)
    c = hidden_values(INPUT, words * 4 + 2, columns, mask, F, KIND, GATED)
    d = hidden_values(INPUT, words * 4 + 3, columns, mask, F, KIND, GATED)
    store_fp8(ROWS, WORDS, a, b, c, d, tl.load(SCALE), words, columns, mask, F, N)
    update_amax(AMAX, max_abs_of_four(a, b, c, d))


@triton.jit
def gated_backward(  # type: ignore[no-untyped-def]
    GRAD, INPUT, OUT, N, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write OUT, the gradient of INPUT (N, 2F) or (N, F), from GRAD (N, F), that of the output of `gated`."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (rows < N)[:, None] & (columns < F)[None, :]
    grad_gate, grad_up = input_gradients(GRAD, INPUT, rows, columns, mask, F, KIND, GATED)
    width = 2 * F if GATED else F
    out_ptrs = OUT + rows[:, None] * width + columns[None, :]
    tl.store(out_ptrs, grad_gate.to(OUT.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(out_ptrs + F, grad_up.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward_fp8(  # type: ignore[no-untyped-def]
    GRAD, INPUT, ROWS, WORDS, SCALE, AMAX, N, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Like `gated_backward`, in FP8: writes ROWS and its transpose."""
    words = tl.program_id(1).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    columns = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (words < N // 4)[:, None] & (columns < F)[None, :]
    width = 2 * F if GATED else F
    scale = tl.load(SCALE)
    a, e = input_gradients(GRAD, INPUT, words * 4, columns, mask, F, KIND, GATED)
    b, f = input_gradients(GRAD, INPUT, words * 4 + 1, columns, mask, F, KIND, GATED)
    c, g = input_gradients(GRAD, INPUT, words * 4 + 2, columns, mask, F, KIND, GATED)
    d, h = input_gradients(GRAD, INPUT, words * 4 + 3, columns, mask, F, KIND, GATED)
    store_fp8(ROWS, WORDS, a, b, c, d, scale, words, columns, mask, width, N)
    largest = max_abs_of_four(a, b, c, d)
    if GATED:
        up = WORDS + F.to(tl.int64) * (N // 4)
        store_fp8(ROWS + F, up, e, f, g, h, scale, words, columns, mask, width, N)
        largest = max_abs(largest, max_abs_of_four(e, f, g, h))
    update_amax(AMAX, largest)


@triton.jit
def hidden_values(  # type: ignore[no-untyped-def]
    INPUT, rows, columns, mask, F, KIND: tl.constexpr, GATED: tl.constexpr
):
    """Return activation(gate) * up, or activation(up) without a gate, in float32."""
    width = 2 * F if GATED else F
    ptrs = INPUT + rows[:, None] * width + columns[None, :]
    hidden, _ = activation(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        hidden *= tl.load(ptrs + F, mask=mask, other=0.0).to(tl.float32)
    return hidden


@triton.jit
def input_gradients(  # type: ignore[no-untyped-def]
    GRAD, INPUT, rows, columns, mask, F, KIND: tl.constexpr, GATED: tl.constexpr
):
    """Return the gradients of gate (or of the only input) and of up, float32."""
    width = 2 * F if GATED else F
    ptrs = INPUT + rows[:, None] * width + columns[None, :]
    grad = tl.load(GRAD + rows[:, None] * F + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    value, slope = activation(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), KIND)
    grad_gate = grad * slope
    if GATED:
        grad_gate *= tl.load(ptrs + F, mask=mask, other=0.0).to(tl.float32)
    return grad_gate, grad * value
