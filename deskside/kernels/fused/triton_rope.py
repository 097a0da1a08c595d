"""QK-norm + RoPE on the fused projection's output, forward and backward (+ cast of the gradient to FP8).

The input's row holds H query heads, K key heads and K value heads of C channels. The forward writes q and k, normalised
and turned; v stays where it is, as a view. The backward reads the three gradients and the raw rows, and writes the
gradient of the whole row. A program takes some tokens and goes over all their heads, so that the angles are read once.
Channels c and c + C/2 are a pair, so every head is loaded as two halves.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import larger, largest_of, note_amax, store_fp8


@triton.jit
def qk_norm_rope(  # type: ignore[no-untyped-def]
    QKV, Q, K, Q_WEIGHT, K_WEIGHT, COS, SIN, N, P, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """QKV: (N, (HEADS + 2 KV_HEADS) C). Q: (N, HEADS, C), K: (N, KV_HEADS, C). COS, SIN: (P, C / 2), P rows in turn."""
    HALF: tl.constexpr = C // 2
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    here = rows < N
    mask = here[:, None]
    half = tl.arange(0, HALF)
    if ROPE:
        angle = (rows % P)[:, None] * HALF + half[None, :]
        cos = tl.load(COS + angle, mask=mask, other=0.0)
        sin = tl.load(SIN + angle, mask=mask, other=0.0)
    for head in range(HEADS + KV_HEADS):
        is_query = head < HEADS
        place = QKV + rows[:, None] * ((HEADS + 2 * KV_HEADS) * C) + head * C + half[None, :]
        a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / C + eps)[:, None]
            weights = Q_WEIGHT if is_query else K_WEIGHT
            a = a * rstd * tl.load(weights + half).to(tl.float32)[None, :]
            b = b * rstd * tl.load(weights + HALF + half).to(tl.float32)[None, :]
        if ROPE:
            first, second = a * cos - b * sin, b * cos + a * sin
        else:
            first, second = a, b
        if is_query:
            out = Q + rows[:, None] * (HEADS * C) + head * C + half[None, :]
        else:
            out = K + rows[:, None] * (KV_HEADS * C) + (head - HEADS) * C + half[None, :]
        tl.store(out, first.to(Q.dtype.element_ty), mask=mask)
        tl.store(out + HALF, second.to(Q.dtype.element_ty), mask=mask)


@triton.jit
def qk_norm_rope_backward(  # type: ignore[no-untyped-def]
    GRAD_Q, GRAD_K, GRAD_V, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, OUT, GRAD_WEIGHTS, N, P, eps,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, EACH: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """EACH heads of some tokens per program, one after the other, so that their angles are found in cache.

    GRAD_Q etc. with the strides of a row and of a head. OUT: (N, (HEADS + 2 KV_HEADS) C).
    GRAD_WEIGHTS: (programs of tokens, HEADS + KV_HEADS, C), each program's share of its norm's weight gradient.
    """
    HALF: tl.constexpr = C // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * C
    rows = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, HALF)
    mask = (rows < N)[:, None] & (half < HALF)[None, :]
    for index in range(EACH):
        head = tl.program_id(0) * EACH + index
        if head < HEADS:
            grad = GRAD_Q + rows[:, None] * q_row + head * q_head + half[None, :]
        elif head < HEADS + KV_HEADS:
            grad = GRAD_K + rows[:, None] * k_row + (head - HEADS) * k_head + half[None, :]
        else:
            grad = GRAD_V + rows[:, None] * v_row + (head - HEADS - KV_HEADS) * v_head + half[None, :]
        first, second, sum_a, sum_b = _head_gradient(
            grad, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, rows, head, N, P, eps, HEADS, KV_HEADS, C, NORM, ROPE
        )
        if NORM:  # noqa: SIM102 (one is decided when compiling)
            if head < HEADS + KV_HEADS:
                sums = GRAD_WEIGHTS + (tl.program_id(1) * (HEADS + KV_HEADS) + head) * C + half
                tl.store(sums, sum_a)
                tl.store(sums + HALF, sum_b)
        out = OUT + rows[:, None] * WIDTH + head * C + half[None, :]
        tl.store(out, first.to(OUT.dtype.element_ty), mask=mask)
        tl.store(out + HALF, second.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def qk_norm_rope_backward_fp8(  # type: ignore[no-untyped-def]
    GRAD_Q, GRAD_K, GRAD_V, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, ROWS, WORDS, SCALE, AMAX, GRAD_WEIGHTS, N, P, eps,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, EACH: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The same into ROWS and its transpose."""
    HALF: tl.constexpr = C // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * C
    words = tl.program_id(1).to(tl.int64) * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    half = tl.arange(0, HALF)
    mask = (words < N // 4)[:, None] & (half < HALF)[None, :]
    scale = tl.load(SCALE)
    largest = tl.zeros((BLOCK_N // 4, HALF), tl.float32)
    for index in range(EACH):
        head = tl.program_id(0) * EACH + index
        if head < HEADS:
            grad = GRAD_Q + words[:, None] * (4 * q_row) + head * q_head + half[None, :]
            row = q_row
        elif head < HEADS + KV_HEADS:
            grad = GRAD_K + words[:, None] * (4 * k_row) + (head - HEADS) * k_head + half[None, :]
            row = k_row
        else:
            grad = GRAD_V + words[:, None] * (4 * v_row) + (head - HEADS - KV_HEADS) * v_head + half[None, :]
            row = v_row
        a, e, sum_a, sum_b = _head_gradient(
            grad,
            QKV,
            Q_WEIGHT,
            K_WEIGHT,
            COS,
            SIN,
            words * 4,
            head,
            N,
            P,
            eps,
            HEADS,
            KV_HEADS,
            C,
            NORM,
            ROPE,
        )
        b, f, x, y = _head_gradient(
            grad + row, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, words * 4 + 1, head, N, P, eps,
            HEADS, KV_HEADS, C, NORM, ROPE,
        )  # fmt: skip
        sum_a += x
        sum_b += y
        c, g, x, y = _head_gradient(
            grad + 2 * row, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, words * 4 + 2, head, N, P, eps,
            HEADS, KV_HEADS, C, NORM, ROPE,
        )  # fmt: skip
        sum_a += x
        sum_b += y
        d, h, x, y = _head_gradient(
            grad + 3 * row, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, words * 4 + 3, head, N, P, eps,
            HEADS, KV_HEADS, C, NORM, ROPE,
        )  # fmt: skip
        sum_a += x
        sum_b += y
        column = head * C + half
        store_fp8(ROWS, WORDS, a, b, c, d, scale, words, column, mask, WIDTH, N)
        store_fp8(ROWS, WORDS, e, f, g, h, scale, words, column + HALF, mask, WIDTH, N)
        largest = larger(largest, larger(largest_of(a, b, c, d), largest_of(e, f, g, h)))
        if NORM:  # noqa: SIM102 (one is decided when compiling)
            if head < HEADS + KV_HEADS:
                sums = GRAD_WEIGHTS + (tl.program_id(1) * (HEADS + KV_HEADS) + head) * C + half
                tl.store(sums, sum_a)
                tl.store(sums + HALF, sum_b)
    note_amax(AMAX, largest)


@triton.jit
def _head_gradient(  # type: ignore[no-untyped-def]
    grad, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, rows, head, N, P, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Of one head of some rows: the gradient of its raw halves, and the sums for its norm's weight (0 for values)."""
    HALF: tl.constexpr = C // 2
    here = rows < N
    half = tl.arange(0, HALF)
    mask = here[:, None] & (half < HALF)[None, :]
    first = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(grad + HALF, mask=mask, other=0.0).to(tl.float32)
    sum_a = tl.zeros((HALF,), tl.float32)
    sum_b = tl.zeros((HALF,), tl.float32)
    if head < HEADS + KV_HEADS:
        if ROPE:
            angle = (rows % P)[:, None] * HALF + half[None, :]
            cos = tl.load(COS + angle, mask=mask, other=0.0)
            sin = tl.load(SIN + angle, mask=mask, other=0.0)
            turned = first * cos + second * sin
            second = second * cos - first * sin
            first = turned
        if NORM:
            place = QKV + rows[:, None] * ((HEADS + 2 * KV_HEADS) * C) + head * C + half[None, :]
            a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / C + eps)[:, None]
            a = a * rstd
            b = b * rstd
            sum_a = tl.sum(first * a, axis=0)
            sum_b = tl.sum(second * b, axis=0)
            weights = Q_WEIGHT if head < HEADS else K_WEIGHT
            first *= tl.load(weights + half).to(tl.float32)[None, :]
            second *= tl.load(weights + HALF + half).to(tl.float32)[None, :]
            mean = ((tl.sum(first * a, axis=1) + tl.sum(second * b, axis=1)) / C)[:, None]
            first = (first - a * mean) * rstd
            second = (second - b * mean) * rstd
    return first, second, sum_a, sum_b
