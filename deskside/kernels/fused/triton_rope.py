"""QK-norm + RoPE on the fused projection's output, forward and backward (+ cast of the gradient to FP8).

A row of the input holds H query heads, K key heads and K value heads of C channels. The forward writes q and k after
QK-norm and RoPE; v remains a view of the input. The backward reads the three gradients and the input, and writes the
gradient of the input. A program of the forward takes some tokens and loops over their heads, so that the angles are
read once. RoPE rotates channels c and c + C/2 as a pair, so every head is loaded as two halves.
"""

import triton
import triton.language as tl

from deskside.kernels.fused.triton_common import max_abs, max_abs_of_four, store_fp8, update_amax


@triton.jit
def qk_norm_rope(  # type: ignore[no-untyped-def]
    QKV, Q, K, Q_WEIGHT, K_WEIGHT, COS, SIN, N, P, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Read QKV (N, (HEADS + 2 KV_HEADS) C), write Q (N, HEADS, C) and K (N, KV_HEADS, C). COS, SIN: (P, C / 2)."""
    HALF: tl.constexpr = C // 2
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = token.to(tl.int64)
    row_mask = rows < N
    mask = row_mask[:, None]
    half = tl.arange(0, HALF)
    if ROPE:
        angle = (token % P)[:, None] * HALF + half[None, :]
        cos = tl.load(COS + angle, mask=mask, other=0.0)
        sin = tl.load(SIN + angle, mask=mask, other=0.0)
    for head in range(HEADS + KV_HEADS):
        is_query = head < HEADS
        ptrs = QKV + rows[:, None] * ((HEADS + 2 * KV_HEADS) * C) + head * C + half[None, :]
        a = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / C + eps)[:, None]
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
def _block_and_group(HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PER_PROGRAM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of a program's block of tokens and group of heads; the groups of one block run together.

    The grid has one dimension, because the others of a GPU's grid end at 65,535.
    """
    groups: tl.constexpr = (HEADS + 2 * KV_HEADS) // PER_PROGRAM
    return tl.program_id(0) // groups, tl.program_id(0) % groups


@triton.jit
def qk_norm_rope_backward(  # type: ignore[no-untyped-def]
    GRAD_Q, GRAD_K, GRAD_V, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, OUT, GRAD_WEIGHTS, N, P, eps,
    q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, PER_PROGRAM: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Write OUT, the gradient of QKV. Each program loops over PER_PROGRAM heads of some tokens.

    The angles of the tokens stay in the cache for all heads of a program. PER_PROGRAM divides HEADS and KV_HEADS, so
    that these heads are all queries, or keys, or values.
    GRAD_Q, GRAD_K, GRAD_V: with the given strides of rows and heads. OUT: (N, (HEADS + 2 KV_HEADS) C).
    GRAD_WEIGHTS: (blocks of tokens, (HEADS + KV_HEADS) / PER_PROGRAM, C), the partial sums of each program.
    """
    HALF: tl.constexpr = C // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * C
    block, group = _block_and_group(HEADS, KV_HEADS, PER_PROGRAM)
    token = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = token.to(tl.int64)
    half = tl.arange(0, HALF)
    mask = (rows < N)[:, None] & (half < HALF)[None, :]
    angle = (token % P)[:, None] * HALF + half[None, :]
    total_a = tl.zeros((BLOCK_N, HALF), tl.float32)
    total_b = tl.zeros((BLOCK_N, HALF), tl.float32)
    for index in range(PER_PROGRAM):
        head = group * PER_PROGRAM + index
        offsets = rows[:, None] * WIDTH + head * C + half[None, :]
        if head < HEADS + KV_HEADS:
            if head < HEADS:
                grad = GRAD_Q + rows[:, None] * q_stride_n + head * q_stride_h + half[None, :]
            else:
                grad = GRAD_K + rows[:, None] * k_stride_n + (head - HEADS) * k_stride_h + half[None, :]
            first, second, share_a, share_b = _head_gradient(
                grad,
                QKV + offsets,
                Q_WEIGHT,
                K_WEIGHT,
                COS,
                SIN,
                angle,
                head < HEADS,
                mask,
                eps,
                C,
                NORM,
                ROPE,
            )
            total_a += share_a
            total_b += share_b
        else:
            grad = (
                GRAD_V + rows[:, None] * v_stride_n + (head - HEADS - KV_HEADS) * v_stride_h + half[None, :]
            )
            first = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(grad + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(OUT + offsets, first.to(OUT.dtype.element_ty), mask=mask)
        tl.store(OUT + offsets + HALF, second.to(OUT.dtype.element_ty), mask=mask)
    if NORM:
        _store_totals(GRAD_WEIGHTS, total_a, total_b, block, group, (HEADS + KV_HEADS) // PER_PROGRAM, C)


@triton.jit
def qk_norm_rope_backward_fp8(  # type: ignore[no-untyped-def]
    GRAD_Q, GRAD_K, GRAD_V, QKV, Q_WEIGHT, K_WEIGHT, COS, SIN, ROWS, WORDS, SCALE, AMAX, GRAD_WEIGHTS, N, P, eps,
    q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr, PER_PROGRAM: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Like `qk_norm_rope_backward`, in FP8: writes ROWS and its transpose.

    Of the four rows of a word, a, b, c, d are the first halves of a head's gradient and e, f, g, h the second halves.
    """
    HALF: tl.constexpr = C // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * C
    block, group = _block_and_group(HEADS, KV_HEADS, PER_PROGRAM)
    word = block * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
    words = word.to(tl.int64)
    half = tl.arange(0, HALF)
    mask = (words < N // 4)[:, None] & (half < HALF)[None, :]
    # One index per row, because P need not be a multiple of four.
    angle_0 = (word * 4 % P)[:, None] * HALF + half[None, :]
    angle_1 = ((word * 4 + 1) % P)[:, None] * HALF + half[None, :]
    angle_2 = ((word * 4 + 2) % P)[:, None] * HALF + half[None, :]
    angle_3 = ((word * 4 + 3) % P)[:, None] * HALF + half[None, :]
    scale = tl.load(SCALE)
    largest = tl.zeros((BLOCK_N // 4, HALF), tl.float32)
    total_a = tl.zeros((BLOCK_N // 4, HALF), tl.float32)
    total_b = tl.zeros((BLOCK_N // 4, HALF), tl.float32)
    for index in range(PER_PROGRAM):
        head = group * PER_PROGRAM + index
        if head < HEADS + KV_HEADS:
            is_query = head < HEADS
            if is_query:
                grad = GRAD_Q + words[:, None] * (4 * q_stride_n) + head * q_stride_h + half[None, :]
                row_stride = q_stride_n
            else:
                grad = (
                    GRAD_K + words[:, None] * (4 * k_stride_n) + (head - HEADS) * k_stride_h + half[None, :]
                )
                row_stride = k_stride_n
            qkv = QKV + words[:, None] * (4 * WIDTH) + head * C + half[None, :]
            a, e, share_a, share_b = _head_gradient(
                grad, qkv, Q_WEIGHT, K_WEIGHT, COS, SIN, angle_0, is_query, mask, eps, C, NORM, ROPE
            )
            b, f, x, y = _head_gradient(
                grad + row_stride, qkv + WIDTH, Q_WEIGHT, K_WEIGHT, COS, SIN, angle_1,
                is_query, mask, eps, C, NORM, ROPE,
            )  # fmt: skip
            share_a += x
            share_b += y
            c, g, x, y = _head_gradient(
                grad + 2 * row_stride, qkv + 2 * WIDTH, Q_WEIGHT, K_WEIGHT, COS, SIN, angle_2,
                is_query, mask, eps, C, NORM, ROPE,
            )  # fmt: skip
            share_a += x
            share_b += y
            d, h, x, y = _head_gradient(
                grad + 3 * row_stride, qkv + 3 * WIDTH, Q_WEIGHT, K_WEIGHT, COS, SIN, angle_3,
                is_query, mask, eps, C, NORM, ROPE,
            )  # fmt: skip
            total_a += share_a + x
            total_b += share_b + y
        else:
            grad = (
                GRAD_V
                + words[:, None] * (4 * v_stride_n)
                + (head - HEADS - KV_HEADS) * v_stride_h
                + half[None, :]
            )
            a = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
            e = tl.load(grad + HALF, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(grad + v_stride_n, mask=mask, other=0.0).to(tl.float32)
            f = tl.load(grad + v_stride_n + HALF, mask=mask, other=0.0).to(tl.float32)
            c = tl.load(grad + 2 * v_stride_n, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(grad + 2 * v_stride_n + HALF, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(grad + 3 * v_stride_n, mask=mask, other=0.0).to(tl.float32)
            h = tl.load(grad + 3 * v_stride_n + HALF, mask=mask, other=0.0).to(tl.float32)
        column = head * C + half
        store_fp8(ROWS, WORDS, a, b, c, d, scale, words, column, mask, WIDTH, N)
        store_fp8(ROWS, WORDS, e, f, g, h, scale, words, column + HALF, mask, WIDTH, N)
        largest = max_abs(largest, max_abs(max_abs_of_four(a, b, c, d), max_abs_of_four(e, f, g, h)))
    if NORM:
        _store_totals(GRAD_WEIGHTS, total_a, total_b, block, group, (HEADS + KV_HEADS) // PER_PROGRAM, C)
    update_amax(AMAX, largest)


@triton.jit
def _head_gradient(  # type: ignore[no-untyped-def]
    grad, qkv, Q_WEIGHT, K_WEIGHT, COS, SIN, angle, is_query, mask, eps,
    C: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Return the gradients of both halves of a query or key head, and each row's share of the norm's weight gradient.

    The shares are not summed here, because a sum over rows waits for other warps. grad and qkv are pointers; angle is
    the index into COS and SIN.
    """
    HALF: tl.constexpr = C // 2
    half = tl.arange(0, HALF)
    first = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(grad + HALF, mask=mask, other=0.0).to(tl.float32)
    share_a = tl.zeros_like(first)
    share_b = tl.zeros_like(first)
    if ROPE:
        c = tl.load(COS + angle, mask=mask, other=0.0)
        s = tl.load(SIN + angle, mask=mask, other=0.0)
        rotated = first * c + second * s
        second = second * c - first * s
        first = rotated
    if NORM:
        a = tl.load(qkv, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(qkv + HALF, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / C + eps)[:, None]
        a = a * rstd
        b = b * rstd
        share_a = first * a
        share_b = second * b
        weights = Q_WEIGHT if is_query else K_WEIGHT
        weight_a = tl.load(weights + half).to(tl.float32)[None, :]
        weight_b = tl.load(weights + HALF + half).to(tl.float32)[None, :]
        mean = (tl.sum(share_a * weight_a + share_b * weight_b, axis=1) / C)[:, None]
        first = (first * weight_a - a * mean) * rstd
        second = (second * weight_b - b * mean) * rstd
    return first, second, share_a, share_b


@triton.jit
def _store_totals(  # type: ignore[no-untyped-def]
    GRAD_WEIGHTS, total_a, total_b, block, group, GROUPS: tl.constexpr, C: tl.constexpr
):
    """Sum the shares of the norm weight's gradient over rows, and write them. Programs of value heads have none."""
    if group < GROUPS:
        sums = GRAD_WEIGHTS + (block * GROUPS + group) * C + tl.arange(0, C // 2)
        tl.store(sums, tl.sum(total_a, axis=0))
        tl.store(sums + C // 2, tl.sum(total_b, axis=0))
