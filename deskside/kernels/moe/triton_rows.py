"""Rows of a mixture of experts: gather them by expert, add them up by token, and gate them with the router's weight."""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_gated import hidden_values, input_gradients


@triton.jit
def dispatch(X, TOKENS, OUT, D, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write OUT (S, D), the row of X (N, D) that TOKENS (S,) names; zeros where it is -1."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(TOKENS + row).to(tl.int64)
    x = tl.load(X + token * D + columns, mask=(columns < D) & (token >= 0), other=0.0)
    tl.store(OUT + row * D + columns, x, mask=columns < D)


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    Y, SLOTS, ADDEND, OUT, D, K: tl.constexpr, HAS_ADDEND: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Write OUT (N, D), the sum of ADDEND (N, D) and of the K rows of Y (S, D) that SLOTS (N, K) names."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < D
    total = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_ADDEND:
        total += tl.load(ADDEND + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        slot = tl.load(SLOTS + row * K + j).to(tl.int64)
        total += tl.load(Y + slot * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + row * D + columns, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def weighted_gated(  # type: ignore[no-untyped-def]
    INPUT, WEIGHTS, OUT, S, F, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Write OUT (S, F) for INPUT (S, 2F), gate and up, or INPUT (S, F), and WEIGHTS (S,)."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (rows < S)[:, None] & (columns < F)[None, :]
    out = hidden_values(INPUT, rows, columns, mask, F, KIND, GATED) * tl.load(WEIGHTS + rows)[:, None]
    tl.store(OUT + rows[:, None] * F + columns[None, :], out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def weighted_gated_backward(  # type: ignore[no-untyped-def]
    GRAD, INPUT, WEIGHTS, OUT, GRAD_WEIGHTS, HIDDEN, S, F,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write OUT, the gradient of INPUT, GRAD_WEIGHTS (S,), and HIDDEN (S, F), the output of `weighted_gated`, from
    GRAD (S, F), the gradient of that output. One program per row."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    weight = tl.load(WEIGHTS + rows)[:, None]
    width = 2 * F if GATED else F
    grad_weight = tl.zeros((1, BLOCK_F), tl.float32)
    for first in range(0, F, BLOCK_F):
        columns = first + tl.arange(0, BLOCK_F)
        mask = (rows < S)[:, None] & (columns < F)[None, :]
        value = hidden_values(INPUT, rows, columns, mask, F, KIND, GATED)
        grad_gate, grad_up = input_gradients(GRAD, INPUT, rows, columns, mask, F, KIND, GATED)
        place = rows[:, None] * F + columns[None, :]
        grad_weight += value * tl.load(GRAD + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(HIDDEN + place, (value * weight).to(HIDDEN.dtype.element_ty), mask=mask)
        ptrs = OUT + rows[:, None] * width + columns[None, :]
        tl.store(ptrs, (grad_gate * weight).to(OUT.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(ptrs + F, (grad_up * weight).to(OUT.dtype.element_ty), mask=mask)
    tl.store(GRAD_WEIGHTS + rows, tl.sum(grad_weight, axis=1))
