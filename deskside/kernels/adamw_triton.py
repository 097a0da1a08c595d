"""The AdamW update of `kernels/adamw.py` as one Triton kernel: every weight, gradient and moment is read once.

Bytes per weight: 12 for weight (read, written) and float32 gradient, and 4 (8 bits), 8 (bfloat16) or 16 (float32) for
the two moments. Codes are decoded from a table of 256 values that stays in the L1 cache, and made by arithmetic: the
decade by comparing with the six borders between decades, then the cell within it. A value within a rounding error of
the border of two cells may take either.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.adamw_state import (
    BLOCK,
    FIRST,
    FIRST_MAX,
    SECOND,
    SECOND_MAX,
    SMALLEST_MAX,
    Rule,
    dynamic_map,
)

SMALLEST = tl.constexpr(SMALLEST_MAX)
PROGRAM = 8  # blocks of 256 that one program updates


@triton.jit
def _code(x, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code of x, scaled to [-1, 1]: a sign, and the rank of the nearest value among the positive ones."""
    size = tl.abs(x)
    # Decade 0 of the smallest values; `cells` doubles from decade to decade.
    first: tl.constexpr = 1 if SIGNED else 2
    start, cells, power = tl.full(x.shape, 0, tl.int32), tl.full(x.shape, first, tl.int32), x * 0 + 1e6
    below, lower = 1e-6, first
    for i in tl.static_range(1, 7):
        # Half way from the last middle of the decade below to the first of this one.
        last = below * (1.0 - 0.45 / lower)
        border = (last + below * (1.0 + 9.0 * 0.5 / (2 * lower))) / 2
        above = size >= border
        start = tl.where(above, first * (2**i - 1), start)
        cells = tl.where(above, first * 2**i, cells)
        power = tl.where(above, 10.0 ** (6 - i), power)
        below, lower = below * 10.0, lower * 2
    cell = tl.floor((size * power - 0.1) * (cells.to(tl.float32) / 0.9)).to(tl.int32)
    rank = start + tl.minimum(tl.maximum(cell, 0), cells - 1) + 1
    top: tl.constexpr = 128 if SIGNED else 255
    rank = tl.where(size >= (1.0 + (1.0 - 0.45 / (64 * first))) / 2, top, rank)
    smallest: tl.constexpr = 1e-6 * (0.1 + 0.45 / first)
    if SIGNED:
        rank = tl.where(size <= smallest / 2, 0, rank)
        rank = tl.where(x < 0, -tl.minimum(rank, 127), rank) + 127
    else:
        rank = tl.where(size > 0, rank, 0)
    return rank


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    p_ptr, g_ptr, m_ptr, v_ptr, m_max_ptr, v_max_ptr, m_map_ptr, v_map_ptr, step_ptr, skip_ptr, factor_ptr,
    lr, decay, fresh1, fresh2, log2_beta1, log2_beta2, eps, n,
    EIGHT_BIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    if tl.load(skip_ptr) > 0:
        return
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = at < n
    has_block = row * WIDTH < n
    p = tl.load(p_ptr + at, inside, 0.0).to(tl.float32)
    g = tl.load(g_ptr + at, inside, 0.0).to(tl.float32)
    if factor_ptr is not None:
        g *= tl.load(factor_ptr)
    if EIGHT_BIT:
        m = tl.load(m_map_ptr + tl.load(m_ptr + at, inside, 127).to(tl.int32))
        v = tl.load(v_map_ptr + tl.load(v_ptr + at, inside, 0).to(tl.int32))
        m *= tl.load(m_max_ptr + row, has_block, 0.0)[:, None]
        v *= tl.load(v_max_ptr + row, has_block, 0.0)[:, None]
    else:
        m = tl.load(m_ptr + at, inside, 0.0).to(tl.float32)
        v = tl.load(v_ptr + at, inside, 0.0).to(tl.float32)
    m += (g - m) * fresh1
    v += (g * g - v) * fresh2
    step = tl.load(step_ptr).to(tl.float64)  # 1 - 0.999 has three digits less than float32
    b1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
    b2 = (1 - tl.exp2(step * log2_beta2)).to(tl.float32)
    p -= p * decay + lr * (m / b1) / (tl.sqrt(v / b2) + eps)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), inside)
    if EIGHT_BIT:
        m_max, v_max = tl.reduce(tl.abs(m), 1, _larger), tl.reduce(v, 1, _larger)
        tl.store(m_max_ptr + row, m_max, has_block)
        tl.store(v_max_ptr + row, v_max, has_block)
        m *= tl.where(m_max >= SMALLEST, 1 / m_max, 0.0)[:, None]
        v *= tl.where(v_max >= SMALLEST, 1 / v_max, 0.0)[:, None]
        tl.store(m_ptr + at, _code(m, True).to(tl.uint8), inside)
        tl.store(v_ptr + at, _code(v, False).to(tl.uint8), inside)
    else:
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), inside)
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), inside)


def launch(
    p: Tensor,
    g: Tensor,
    state: dict[str, Tensor],
    step: Tensor,
    skip: Tensor,
    rule: Rule,
    factor: Tensor | None,
) -> None:
    """See `kernels.adamw.adamw_update`."""
    eight = state[FIRST].dtype == torch.uint8
    scales = (state[FIRST_MAX], state[SECOND_MAX]) if eight else (step, step)
    maps = (dynamic_map(signed, p.device) for signed in (True, False))
    n = p.numel()
    _adamw[(triton.cdiv(n, PROGRAM * BLOCK),)](
        p, g, state[FIRST], state[SECOND], *scales, *maps, step, skip, factor,
        rule.lr, rule.lr * rule.weight_decay, *(1 - beta for beta in rule.betas), *(_log2(beta) for beta in rule.betas),
        rule.eps, n,
        EIGHT_BIT=eight, ROWS=PROGRAM, WIDTH=BLOCK,
    )  # fmt: skip


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf  # 2 ** -inf is the zero that 0 ** step is
