"""The two element-wise kernels of `kernels/muon.py` in Triton: tiles of 64 x 64 weights, every tensor with its strides.

A stack may hold a slice transposed; then one tensor is contiguous along rows and the other along columns. The compiler
orders each access by its strides and exchanges values between threads through shared memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.random_triton import rounded_to

TILE = 64


@triton.jit
def _offsets(expert, row, column, stride_e, stride_r, stride_c):  # type: ignore[no-untyped-def]
    return expert * stride_e + row[:, None] * stride_r + column[None, :] * stride_c


@triton.jit
def _look_ahead(  # type: ignore[no-untyped-def]
    g_ptr, m_ptr, out_ptr, skip_ptr, momentum, rows, columns,
    g_e, g_r, g_c, m_e, m_r, m_c, out_e, out_r, out_c,
    NESTEROV: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Process one tile of SIDE x SIDE of one expert. The `*_e`, `*_r`, `*_c` are strides of experts, rows, columns."""
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    m_ptrs = m_ptr + _offsets(expert, row, column, m_e, m_r, m_c)
    m = tl.load(m_ptrs, mask, 0.0).to(tl.float32)
    g = tl.load(g_ptr + _offsets(expert, row, column, g_e, g_r, g_c), mask, 0.0).to(tl.float32)
    g = tl.where(tl.load(skip_ptr) > 0, m, g)
    m += (g - m) * (1 - momentum)
    tl.store(m_ptrs, m.to(m_ptr.dtype.element_ty), mask)
    if NESTEROV:
        m = g + (m - g) * momentum
    out_ptrs = out_ptr + _offsets(expert, row, column, out_e, out_r, out_c)
    tl.store(out_ptrs, m.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["seed"])
def _apply(  # type: ignore[no-untyped-def]
    p_ptr, u_ptr, f_ptr, skip_ptr, lr, weight_decay, seed, rows, columns,
    p_e, p_r, p_c, u_e, u_r, u_c, f_e, f_r, f_c,
    CAUTIOUS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Update one tile of SIDE x SIDE weights of one expert; strides as in `_look_ahead`."""
    if tl.load(skip_ptr) > 0:
        return
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    p_ptrs = p_ptr + _offsets(expert, row, column, p_e, p_r, p_c)
    p = tl.load(p_ptrs, mask, 0.0).to(tl.float32)
    u = tl.load(u_ptr + _offsets(expert, row, column, u_e, u_r, u_c), mask, 0.0).to(tl.float32)
    u *= tl.load(f_ptr + _offsets(expert, row, column, f_e, f_r, f_c), mask, 0.0)
    decay = weight_decay * p
    if CAUTIOUS:
        decay = tl.where(u * p >= 0, decay, 0.0)
    p = p - lr * u - decay
    element = (expert * rows + row[:, None]) * columns + column[None, :]
    tl.store(p_ptrs, rounded_to(p, element, seed, p_ptr.dtype.element_ty), mask)


def look_ahead(
    g_ERC: Tensor, m_ERC: Tensor, out_ERC: Tensor, momentum: float, nesterov: bool, skip: Tensor
) -> None:
    """See `kernels.muon.look_ahead`."""
    _look_ahead[_grid(g_ERC)](
        g_ERC, m_ERC, out_ERC, skip, momentum, *g_ERC.shape[1:], *g_ERC.stride(), *m_ERC.stride(), *out_ERC.stride(),
        NESTEROV=nesterov, SIDE=TILE,
    )  # fmt: skip


def apply(
    p_ERC: Tensor,
    u_ERC: Tensor,
    factors_ERC: Tensor,
    lr: float,
    weight_decay: float,
    cautious: bool,
    skip: Tensor,
    seed: int = 0,
) -> None:
    """See `kernels.muon.apply`."""
    _apply[_grid(p_ERC)](
        p_ERC, u_ERC, factors_ERC, skip, lr, weight_decay, seed, *p_ERC.shape[1:],
        *p_ERC.stride(), *u_ERC.stride(), *factors_ERC.stride(),
        CAUTIOUS=cautious, SIDE=TILE,
    )  # fmt: skip


def _grid(x_ERC: Tensor) -> tuple[int, int, int]:
    experts, rows, columns = x_ERC.shape
    return triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), experts
