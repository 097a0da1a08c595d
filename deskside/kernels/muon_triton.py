"""The two element-wise kernels of `kernels/muon.py` in Triton: tiles of 64 x 64 weights of many slices in one launch.

A table has one row of 64-bit integers for each slice: addresses, sizes and strides. A program reads the row of its
slice, and from then on works like a kernel for one slice. Gradients, momentum and weights are contiguous along columns.
A stack may hold a slice transposed; then the compiler exchanges values between threads through shared memory.
"""

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.muon import Direction, PointerTable, Update
from deskside.kernels.weights_24bit_triton import load_weight, store_weight

TILE = 64
WIDTH = 20  # integers in a row of a table
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = tl.load(address).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _multiple(address, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(address)
    return tl.multiple_of(value, 16) if ALIGNED else value


@triton.jit
def _tile(entry, ALIGNED: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether this program has a tile in its slice, and the rows and columns of the tile.

    entry: experts, rows, columns of the slice. program_id: tile, expert, slice.
    """
    experts, rows, columns = tl.load(entry), _multiple(entry + 1, ALIGNED), _multiple(entry + 2, ALIGNED)
    across = tl.cdiv(columns, SIDE)
    i = tl.program_id(0) // across * SIDE
    row = i + tl.arange(0, SIDE)
    column = tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)
    return (i < rows) & (tl.program_id(1) < experts), row, column, rows, columns


@triton.jit
def _look_ahead(  # type: ignore[no-untyped-def]
    TABLE, SQUARES, CLIP, skip_ptr, momentum,
    G: tl.constexpr, M: tl.constexpr, OUT: tl.constexpr, NESTEROV: tl.constexpr, ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Process one tile. G, M, OUT: types. SQUARES: (slices x experts, tiles), each tile's sum of squares, or None.

    TABLE: experts, rows, columns; addresses of g, m, out; their strides of experts; those of g's and m's rows; the
    stride of out along its slower dimension; and 1 if that is the slice's columns, because out is transposed.
    """
    entry = TABLE + tl.program_id(2) * WIDTH
    exists, row, column, rows, columns = _tile(entry, ALIGNED, SIDE)
    if not exists:
        return
    expert = tl.program_id(1).to(tl.int64)
    g_ptr = _pointer(entry + 3, G, ALIGNED) + expert * _multiple(entry + 6, ALIGNED)
    m_ptr = _pointer(entry + 4, M, ALIGNED) + expert * _multiple(entry + 7, ALIGNED)
    out_ptr = _pointer(entry + 5, OUT, ALIGNED) + expert * _multiple(entry + 8, ALIGNED)
    out_stride = _multiple(entry + 11, ALIGNED)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    m_ptrs = m_ptr + row[:, None] * _multiple(entry + 10, ALIGNED) + column[None, :]
    m = tl.load(m_ptrs, mask, 0.0).to(tl.float32)
    g = tl.load(g_ptr + row[:, None] * _multiple(entry + 9, ALIGNED) + column[None, :], mask, 0.0).to(
        tl.float32
    )
    if CLIP is not None:
        g *= tl.load(CLIP)
    g = tl.where(tl.load(skip_ptr) > 0, m, g)
    m += (g - m) * (1 - momentum)
    tl.store(m_ptrs, m.to(M), mask)
    if NESTEROV:
        m = g + (m - g) * momentum
    if tl.load(entry + 12) != 0:
        tl.store(out_ptr + column[None, :] * out_stride + row[:, None], m.to(OUT), mask)
    else:
        tl.store(out_ptr + row[:, None] * out_stride + column[None, :], m.to(OUT), mask)
    if SQUARES is not None:
        matrix = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        squares = tl.sum(tl.sum(tl.where(mask, m * m, 0.0), 1), 0)
        tl.store(SQUARES + matrix * tl.num_programs(0) + tl.program_id(0), squares)


@triton.jit
def _update(entry, expert, row, column, rows, columns, U: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile of u, multiplied by its factors. entry: as in `_apply`."""
    u_ptr = _pointer(entry + 4, U, ALIGNED) + expert * _multiple(entry + 7, ALIGNED)
    f_ptr = _pointer(entry + 5, tl.float32, False) + expert * tl.load(entry + 8)
    u_stride = _multiple(entry + 10, ALIGNED)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    if tl.load(entry + 13) != 0:
        u = tl.load(u_ptr + column[None, :] * u_stride + row[:, None], mask, 0.0).to(tl.float32)
    else:
        u = tl.load(u_ptr + row[:, None] * u_stride + column[None, :], mask, 0.0).to(tl.float32)
    # The factors are constant along rows or along columns, so they are read once, as a vector along the other
    # dimension.
    along_rows = tl.load(f_ptr + row * tl.load(entry + 11), row < rows, 0.0)
    along_columns = tl.load(f_ptr + column * tl.load(entry + 12), column < columns, 0.0)
    return u * tl.where(tl.load(entry + 12) != 0, along_columns[None, :], along_rows[:, None])


@triton.jit
def _residuals(entry, expert, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the address of an expert's residuals, whose strides are those of p. entry: as in `_apply`."""
    return _pointer(entry + 19, tl.int8, ALIGNED) + expert * _multiple(entry + 6, ALIGNED)


@triton.jit(do_not_specialize=["step"])
def _apply(  # type: ignore[no-untyped-def]
    TABLE, skip_ptr, lr, weight_decay, step,
    P: tl.constexpr, U: tl.constexpr, CAUTIOUS: tl.constexpr, ROW_FACTORS: tl.constexpr, RESIDUALS: tl.constexpr,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Update one tile of weights. P, U: types. ROW_FACTORS, RESIDUALS: whether there are any.

    TABLE: experts, rows, columns; addresses of p, u, factors; their strides of experts; those of p's rows, of u along
    its slower dimension, of factors along rows and columns; 1 if u is transposed; bits of the scale; the seed; the
    address of the row factors, and their strides from those of p to those of u and of experts; that of the residuals.
    """
    if tl.load(skip_ptr) > 0:
        return
    entry = TABLE + tl.program_id(2) * WIDTH
    exists, row, column, rows, columns = _tile(entry, ALIGNED, SIDE)
    if not exists:
        return
    expert = tl.program_id(1).to(tl.int64)
    p_ptr = _pointer(entry + 3, P, ALIGNED) + expert * _multiple(entry + 6, ALIGNED)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    residual_ptr = _residuals(entry, expert, ALIGNED) if RESIDUALS else None
    offsets = row[:, None] * _multiple(entry + 9, ALIGNED) + column[None, :]
    p = load_weight(p_ptr, residual_ptr, offsets, mask)
    u = _update(entry, expert, row, column, rows, columns, U, ALIGNED)
    decay = weight_decay * p
    if CAUTIOUS:
        decay = tl.where(u * p >= 0, decay, 0.0)
    scale = tl.load(entry + 14).to(tl.int32).to(tl.float32, bitcast=True)
    if ROW_FACTORS:
        row_ptr = _pointer(entry + 16, tl.float32, False) + expert * tl.load(entry + 18) + row
        of_p = tl.load(row_ptr, row < rows, 0.0)
        of_u = tl.load(row_ptr + tl.load(entry + 17), row < rows, 0.0)
        p = of_p[:, None] * p - of_u[:, None] * (lr * scale * u) - decay
    else:
        p = p - lr * scale * u - decay
    element = (expert * rows + row[:, None]) * columns + column[None, :]
    store_weight(p_ptr, residual_ptr, p, offsets, mask, element, tl.load(entry + 15) + step)


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    TABLE, OUT, stride,
    P: tl.constexpr, U: tl.constexpr, RESIDUALS: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Sum over SIDE rows. OUT: (slices, 3, experts, stride). TABLE: as in `_apply`."""
    entry = TABLE + tl.program_id(2) * WIDTH
    experts, rows, columns = tl.load(entry), _multiple(entry + 1, ALIGNED), _multiple(entry + 2, ALIGNED)
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    if (tl.program_id(0) * SIDE >= rows) | (tl.program_id(1) >= experts):
        return
    expert = tl.program_id(1).to(tl.int64)
    p_ptr = _pointer(entry + 3, P, ALIGNED) + expert * _multiple(entry + 6, ALIGNED)
    residual_ptr = _residuals(entry, expert, ALIGNED) if RESIDUALS else None
    row_offsets = row[:, None] * _multiple(entry + 9, ALIGNED)
    scale = tl.load(entry + 14).to(tl.int32).to(tl.float32, bitcast=True)
    pp = tl.zeros((SIDE,), tl.float32)
    pv = tl.zeros((SIDE,), tl.float32)
    vv = tl.zeros((SIDE,), tl.float32)
    for start in range(0, columns, SIDE):
        column = start + tl.arange(0, SIDE)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        p = load_weight(p_ptr, residual_ptr, row_offsets + column[None, :], mask)
        v = scale * _update(entry, expert, row, column, rows, columns, U, ALIGNED)
        pp += tl.sum(p * p, 1)
        pv += tl.sum(p * v, 1)
        vv += tl.sum(v * v, 1)
    part = tl.num_programs(1).to(tl.int64) * stride
    out_ptr = OUT + tl.program_id(2) * 3 * part + expert * stride + row
    tl.store(out_ptr, pp, row < rows)
    tl.store(out_ptr + part, pv, row < rows)
    tl.store(out_ptr + 2 * part, vv, row < rows)


def look_ahead(
    slices: Sequence[Direction],
    momentum: float,
    nesterov: bool,
    skip: Tensor,
    clip: Tensor | None,
    table: PointerTable,
) -> Tensor:
    """See `kernels.muon.look_ahead`."""
    rows = [
        [*_row(s.g, s.m, s.out), s.g.stride(1), s.m.stride(1), max(s.out.stride()[1:]), _transposed(s.out)]
        for s in slices
    ]
    grid = _grid([s.g for s in slices])
    squares = torch.zeros(grid[2] * grid[1], grid[0], dtype=torch.float32, device=skip.device)
    first = slices[0]
    _look_ahead[grid](
        _on_device(table, rows, skip.device), squares, clip, skip, momentum,
        G=TYPES[first.g.dtype], M=TYPES[first.m.dtype], OUT=TYPES[first.out.dtype], NESTEROV=nesterov,
        ALIGNED=all(value % 16 == 0 for row in rows for value in row[1:12]), WIDTH=WIDTH, SIDE=TILE,
    )  # fmt: skip
    return squares.sum(dim=1)


def apply(
    slices: Sequence[Update],
    lr: float,
    weight_decay: float,
    cautious: bool,
    skip: Tensor,
    step: int,
    table: PointerTable,
) -> None:
    """See `kernels.muon.apply`."""
    first = slices[0]
    rows, aligned = _update_rows(slices)
    _apply[_grid([s.p for s in slices])](
        _on_device(table, rows, skip.device), skip, lr, weight_decay, step,
        P=TYPES[first.p.dtype], U=TYPES[first.u.dtype], CAUTIOUS=cautious,
        ROW_FACTORS=first.row_factors is not None, RESIDUALS=first.residual is not None,
        ALIGNED=aligned, WIDTH=WIDTH, SIDE=TILE,
    )  # fmt: skip


def row_sums(slices: Sequence[Update], table: PointerTable) -> Tensor:
    """See `kernels.muon.row_sums`."""
    first = slices[0]
    experts, longest = (max(s.p.shape[i] for s in slices) for i in (0, 1))
    sums = torch.zeros((len(slices), 3, experts, longest), dtype=torch.float32, device=first.p.device)
    rows, aligned = _update_rows(slices)
    _row_sums[(triton.cdiv(longest, TILE), experts, len(slices))](
        _on_device(table, rows, sums.device), sums, longest,
        P=TYPES[first.p.dtype], U=TYPES[first.u.dtype], RESIDUALS=first.residual is not None,
        ALIGNED=aligned, WIDTH=WIDTH, SIDE=TILE,
    )  # fmt: skip
    return sums


def _update_rows(slices: Sequence[Update]) -> tuple[list[list[int]], bool]:
    """Return the rows of `_apply`'s table, and whether its sizes, addresses and strides are multiples of 16."""
    rows = []
    for s in slices:
        strides = [s.p.stride(1), max(s.u.stride()[1:]), *_factor_strides(s.factors)]
        scale = struct.unpack("<i", struct.pack("<f", s.scale))[0]
        own = [0] * 3 if s.row_factors is None else [s.row_factors.data_ptr(), *s.row_factors.stride()[:2]]
        residual = 0 if s.residual is None else s.residual.data_ptr()
        rows.append([*_row(s.p, s.u, s.factors), *strides, _transposed(s.u), scale, s.seed, *own, residual])
    aligned = all(value % 16 == 0 for row in rows for value in (*row[1:5], *row[6:8], *row[9:11], row[19]))
    return rows, aligned


def _factor_strides(factors: Tensor) -> list[int]:
    """Return the strides along rows and columns, one of which is 0. Raises ValueError if neither is."""
    strides = [factors.stride(i) if factors.shape[i] > 1 else 0 for i in (1, 2)]
    if all(strides):
        raise ValueError("factors: must be constant along rows or along columns, as a view with stride 0")
    return strides


def _row(*tensors: Tensor) -> list[int]:
    """Return the common part of a table's row: sizes, addresses, strides of experts."""
    return [*tensors[0].shape, *(t.data_ptr() for t in tensors), *(t.stride(0) for t in tensors)]


def _transposed(x: Tensor) -> int:
    return int(x.stride(2) > x.stride(1))


def _on_device(table: PointerTable, rows: list[list[int]], device: torch.device) -> Tensor:
    return table.on_device([row + [0] * (WIDTH - len(row)) for row in rows], device)


def _grid(slices: list[Tensor]) -> tuple[int, int, int]:
    """Return the largest number of tiles in a matrix, the largest number of experts, and the number of slices."""
    tiles = max(triton.cdiv(x.shape[1], TILE) * triton.cdiv(x.shape[2], TILE) for x in slices)
    return tiles, max(x.shape[0] for x in slices), len(slices)
