"""The AdamW update of `kernels/adamw.py` as one Triton kernel: every weight, gradient and moment is read once.

Bytes per weight: 12 for weight (read, written) and gradient in float32, 6 in bfloat16, 8 with weights in 24 bits; and 2
(4 bits), 4 (8 bits), 8 (bfloat16) or 16 (float32) for the two moments. 8-bit codes are decoded with a table of 256
values that stays in the L1 cache. They are encoded by arithmetic: comparisons with the six borders between decades give
the decade, and a product gives the cell within it. A value within a rounding error of the border between two cells may
get either code. 4-bit codes of a first moment are decoded with a table of 16 values, and encoded by comparisons with
the eight borders.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels import adamw_4bit
from deskside.kernels.adamw_state import (
    BLOCK,
    EXP_AVG,
    EXP_AVG_MAX,
    EXP_AVG_SQ,
    EXP_AVG_SQ_MAX,
    SMALLEST_MAX,
    AdamWHyperparameters,
    bits_of,
    dynamic_map,
)
from deskside.kernels.weights_24bit_triton import load_weight, store_weight

SMALLEST = tl.constexpr(SMALLEST_MAX)
BLOCKS_PER_PROGRAM = 8  # of 256 weights each


@triton.jit
def _code(x, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the codes of values x in [-1, 1]: the sign, and the rank of the nearest value among the positive ones."""
    magnitude = tl.abs(x)
    # For the decade of x: the ranks below it, its number of cells, and the factor that maps it to [0.1, 1].
    first_cells: tl.constexpr = 1 if SIGNED else 2
    ranks_below = tl.full(x.shape, 0, tl.int32)
    cells = tl.full(x.shape, first_cells, tl.int32)
    to_unit = x * 0 + 1e6
    decade_start, cells_below = 1e-6, first_cells
    for i in tl.static_range(1, 7):
        # The midpoint between the largest value of the decade below and the smallest of this one.
        last_below = decade_start * (1.0 - 0.45 / cells_below)
        border = (last_below + decade_start * (1.0 + 9.0 * 0.5 / (2 * cells_below))) / 2
        above = magnitude >= border
        ranks_below = tl.where(above, first_cells * (2**i - 1), ranks_below)
        cells = tl.where(above, first_cells * 2**i, cells)
        to_unit = tl.where(above, 10.0 ** (6 - i), to_unit)
        decade_start, cells_below = decade_start * 10.0, cells_below * 2
    cell = tl.floor((magnitude * to_unit - 0.1) * (cells.to(tl.float32) / 0.9)).to(tl.int32)
    rank = ranks_below + tl.minimum(tl.maximum(cell, 0), cells - 1) + 1
    top_rank: tl.constexpr = 128 if SIGNED else 255
    rank = tl.where(magnitude >= (1.0 + (1.0 - 0.45 / (64 * first_cells))) / 2, top_rank, rank)
    smallest: tl.constexpr = 1e-6 * (0.1 + 0.45 / first_cells)
    if SIGNED:
        rank = tl.where(magnitude <= smallest / 2, 0, rank)
        rank = tl.where(x < 0, -tl.minimum(rank, 127), rank) + 127
    else:
        rank = tl.where(magnitude > 0, rank, 0)
    return rank


@triton.jit
def _code_4bit(x):  # type: ignore[no-untyped-def]
    """Return the 4-bit codes of first moments x in [-1, 1]. Borders: midpoints of `adamw_4bit.MAGNITUDES`."""
    magnitude = tl.abs(x)
    rank = (magnitude > 0.00275).to(tl.int32) + (magnitude > 0.019).to(tl.int32)
    rank += (magnitude > 0.055).to(tl.int32) + (magnitude > 0.145).to(tl.int32)
    rank += (magnitude > 0.325).to(tl.int32) + (magnitude > 0.55).to(tl.int32)
    rank += (magnitude > 0.775).to(tl.int32) + (magnitude > 0.94375).to(tl.int32)
    return tl.where(x < 0, -tl.minimum(rank, 7), rank) + 7


@triton.jit
def _load_4bit(codes_ptr, row, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the codes of whole blocks, two in a byte: (rows, WIDTH) int32."""
    byte = row[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    packed = tl.load(codes_ptr + byte, 2 * byte < n, 0).to(tl.int32)
    return tl.interleave(packed & 15, packed >> 4)


@triton.jit
def _store_4bit(codes_ptr, codes, row, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store codes (ROWS, WIDTH), two in a byte."""
    byte = row[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    low, high = tl.split(tl.reshape(codes, (ROWS, WIDTH // 2, 2)))
    tl.store(codes_ptr + byte, (low | (high << 4)).to(tl.uint8), 2 * byte < n)


@triton.jit
def maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["seed", "first"])
def _adamw(  # type: ignore[no-untyped-def]
    p_ptr, g_ptr, m_ptr, v_ptr, m_max_ptr, v_max_ptr, m_map_ptr, v_map_ptr, step_ptr, skip_ptr, factor_ptr,
    residual_ptr, lr, decay, one_minus_beta1, one_minus_beta2, log2_beta1, log2_beta2, eps, n, seed, first,
    BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CAUTIOUS: tl.constexpr,
):  # fmt: skip
    """Update ROWS blocks of WIDTH weights per program.

    decay: lr x weight_decay. factor_ptr, residual_ptr: as in `adamw_update`. BITS: per value of a moment. CAUTIOUS:
    decay is cautious.
    """
    if tl.load(skip_ptr) > 0:
        return
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = offsets < n
    row_mask = row * WIDTH < n
    p = load_weight(p_ptr, residual_ptr, offsets, mask)
    g = tl.load(g_ptr + offsets, mask, 0.0).to(tl.float32)
    if factor_ptr is not None:
        g *= tl.load(factor_ptr)
    if BITS <= 8:
        if BITS == 4:
            # Codes beyond the end do not represent 0, and would change the scale of the last block.
            m = tl.where(mask, tl.load(m_map_ptr + _load_4bit(m_ptr, row, n, WIDTH)), 0.0)
            v = tl.where(mask, (_load_4bit(v_ptr, row, n, WIDTH) + 1).to(tl.float32) * 0.0625, 0.0)
        else:
            m = tl.load(m_map_ptr + tl.load(m_ptr + offsets, mask, 127).to(tl.int32))
            v = tl.load(v_map_ptr + tl.load(v_ptr + offsets, mask, 0).to(tl.int32))
        m *= tl.load(m_max_ptr + row, row_mask, 0.0)[:, None]
        v *= tl.load(v_max_ptr + row, row_mask, 0.0)[:, None]
    else:
        m = tl.load(m_ptr + offsets, mask, 0.0).to(tl.float32)
        v = tl.load(v_ptr + offsets, mask, 0.0).to(tl.float32)
    m += (g - m) * one_minus_beta1
    v += (g * g - v) * one_minus_beta2
    step = tl.load(step_ptr).to(tl.float64)  # 1 - 0.999 would lose three digits in float32
    bias_correction1 = (1 - tl.exp2(step * log2_beta1)).to(tl.float32)
    bias_correction2 = (1 - tl.exp2(step * log2_beta2)).to(tl.float32)
    if CAUTIOUS:
        update = (m / bias_correction1) / (tl.sqrt(v / bias_correction2) + eps)
        p -= tl.where(update * p >= 0, p * decay, 0.0) + lr * update
    else:
        p -= p * decay + lr * (m / bias_correction1) / (tl.sqrt(v / bias_correction2) + eps)
    store_weight(p_ptr, residual_ptr, p, offsets, mask, first + offsets, seed)
    if BITS <= 8:
        m_max, v_max = tl.reduce(tl.abs(m), 1, maximum), tl.reduce(v, 1, maximum)
        tl.store(m_max_ptr + row, m_max, row_mask)
        tl.store(v_max_ptr + row, v_max, row_mask)
        m *= tl.where(m_max >= SMALLEST, 1 / m_max, 0.0)[:, None]
        v *= tl.where(v_max >= SMALLEST, 1 / v_max, 0.0)[:, None]
        if BITS == 4:
            _store_4bit(m_ptr, _code_4bit(m), row, n, ROWS, WIDTH)
            v_code = tl.floor(v * 16 + 0.5).to(tl.int32)
            _store_4bit(v_ptr, tl.minimum(tl.maximum(v_code, 1), 16) - 1, row, n, ROWS, WIDTH)
        else:
            tl.store(m_ptr + offsets, _code(m, True).to(tl.uint8), mask)
            tl.store(v_ptr + offsets, _code(v, False).to(tl.uint8), mask)
    else:
        tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask)
        tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask)


def launch(
    p: Tensor,
    g: Tensor,
    state: dict[str, Tensor],
    step: Tensor,
    skip: Tensor,
    hparams: AdamWHyperparameters,
    factor: Tensor | None,
    seed: int = 0,
    first: int = 0,
    residual: Tensor | None = None,
) -> None:
    """See `kernels.adamw.adamw_update`."""
    n = p.numel()
    bits = bits_of(state[EXP_AVG], n)
    scales = (state[EXP_AVG_MAX], state[EXP_AVG_SQ_MAX]) if bits <= 8 else (step, step)
    maps = tuple(dynamic_map(signed, p.device) for signed in (True, False))
    if bits == 4:
        maps = (adamw_4bit.first_map(p.device), maps[1])
    width = adamw_4bit.BLOCK if bits == 4 else BLOCK
    rows = BLOCKS_PER_PROGRAM * BLOCK // width
    _adamw[(triton.cdiv(n, rows * width),)](
        p, g, state[EXP_AVG], state[EXP_AVG_SQ], *scales, *maps, step, skip, factor, residual,
        hparams.lr, hparams.lr * hparams.weight_decay, *(1 - beta for beta in hparams.betas),
        *(_log2(beta) for beta in hparams.betas), hparams.eps, n, seed, first,
        BITS=bits, ROWS=rows, WIDTH=width, CAUTIOUS=hparams.cautious,
    )  # fmt: skip


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf  # the kernel's 2 ** (step * -inf) is 0, as 0 ** step is
