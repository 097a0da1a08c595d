"""The kernels of `stored_weights.py` in Triton: rows of a float32 table in 16 bits, the table's gradient, INT8 codes.

The gradient's row of an entry is the sum over all tokens that are it, and tokens are distributed as unevenly as words:
one entry may have a tenth of them, and half of the entries none. So tokens are sorted, and cut into pieces of PIECE. A
piece adds up its runs of equal tokens by a product with a matrix of zeros and ones, on tensor cores with float32 sums.
A run that lies within a piece is written where it belongs; the shares of one that goes on are left for a second
kernel, which adds them in order. Nothing is atomic, so the same tokens give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 64  # sorted tokens of a program
COLUMNS = 128  # channels of a program
SHARES = 32  # pieces whose shares of a run are read at a time
TILE_ROWS, TILE_COLUMNS = 8, 512  # of INT8 codes: 32 codes a thread, read 16 bytes at a time


@triton.jit
def gather(  # type: ignore[no-untyped-def]
    TABLE, TOKENS, OUT, N, V,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """OUT (N, D): the rows TOKENS (N,) of TABLE (V, D), rounded. NaN for a token that is no row."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(TOKENS + rows, mask=rows < N, other=0)
    known = (token >= 0) & (token < V)
    inside = (columns < D)[None, :]
    x = tl.load(
        TABLE + token[:, None] * D + columns[None, :], mask=known[:, None] & inside, other=float("nan")
    )
    place = OUT + rows[:, None] * D + columns[None, :]
    tl.store(place, x.to(OUT.dtype.element_ty), mask=(rows < N)[:, None] & inside)


@triton.jit
def add_runs(  # type: ignore[no-untyped-def]
    GRAD, IDS, ORDER, OUT, FIRST, LAST, N, V,
    D: tl.constexpr, PIECE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """OUT (V, D): sums of the rows ORDER of GRAD (N, D) over runs of equal IDS (N,), which are sorted.

    FIRST, LAST: (pieces, D), the sum of a piece's first run where it began before, of its last run where it began here
    and goes on.
    """
    piece = tl.program_id(0)
    at = piece * PIECE + tl.arange(0, PIECE)
    here = at < N
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (columns < D)[None, :]
    row = tl.load(ORDER + at, mask=here, other=0)
    grad = tl.load(GRAD + row[:, None] * D + columns[None, :], mask=here[:, None] & inside, other=0.0)
    ids = tl.load(IDS + at, mask=here, other=-1).to(tl.int32)
    before = tl.load(IDS + at - 1, mask=here & (at > 0), other=-1).to(tl.int32)
    after = tl.load(IDS + at + 1, mask=at + 1 < N, other=-1).to(tl.int32)
    place = tl.arange(0, PIECE)
    run_of = tl.cumsum(((ids != before) & (place > 0)).to(tl.int32), axis=0)
    belongs = run_of[None, :] == place[:, None]  # (runs, tokens)
    sums = tl.dot(belongs.to(grad.dtype), grad)
    # Of each run: its entry, and whether its first token continues another piece's, its last one is continued.
    entry = tl.max(tl.where(belongs, ids[None, :], -1), axis=1)
    continues = (here & (place == 0) & (ids == before)).to(tl.int32)
    goes_on = (here & (place == PIECE - 1) & (ids == after)).to(tl.int32)
    first = tl.max(tl.where(belongs, continues[None, :], 0), axis=1) > 0
    last = (tl.max(tl.where(belongs, goes_on[None, :], 0), axis=1) > 0) & (first == 0)
    own = (entry >= 0) & (entry < V) & (first == 0) & (last == 0)
    tl.store(OUT + entry.to(tl.int64)[:, None] * D + columns[None, :], sums, mask=own[:, None] & inside)
    share = piece.to(tl.int64) * D + columns[None, :] + place[:, None] * 0
    tl.store(FIRST + share, sums, mask=first[:, None] & inside)
    tl.store(LAST + share, sums, mask=last[:, None] & inside)


@triton.jit
def join_runs(  # type: ignore[no-untyped-def]
    IDS, OUT, FIRST, LAST, N, V,
    D: tl.constexpr, PIECE: tl.constexpr, SHARES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """OUT (V, D): the sum of the run that begins in this program's piece and goes on, if there is one."""
    piece = tl.program_id(0)
    start = piece * PIECE
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    entry = tl.load(IDS + start + PIECE - 1, mask=start + PIECE < N, other=-1).to(tl.int32)
    after = tl.load(IDS + start + PIECE, mask=start + PIECE < N, other=-2).to(tl.int32)
    before = tl.load(IDS + start - 1, mask=start > 0, other=-1).to(tl.int32)
    if (entry == after) & (entry != before) & (entry >= 0) & (entry < V):
        total = tl.load(LAST + piece.to(tl.int64) * D + columns, mask=columns < D, other=0.0)
        pieces = piece + 1 + tl.arange(0, SHARES)
        more = 1
        while more > 0:
            head = tl.load(IDS + pieces * PIECE, mask=pieces * PIECE < N, other=-1).to(tl.int32)
            mine = head == entry
            place = FIRST + pieces.to(tl.int64)[:, None] * D + columns[None, :]
            total += tl.sum(tl.load(place, mask=mine[:, None] & (columns < D)[None, :], other=0.0), axis=0)
            more = tl.min(mine.to(tl.int32), axis=0)
            pieces += SHARES
        tl.store(OUT + entry.to(tl.int64) * D + columns, total, mask=columns < D)


def embedding(tokens_N: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, D): the rows of the table in `dtype`."""
    (N,), (V, D) = tokens_N.shape, weight_VD.shape
    out = torch.empty(N, D, dtype=dtype, device=weight_VD.device)
    grid = (triton.cdiv(N, 16), triton.cdiv(D, 256))
    gather[grid](weight_VD, tokens_N, out, N, V, D, 16, 256, num_warps=4)
    return out


def embedding_gradient(grad_ND: Tensor, tokens_N: Tensor, entries: int) -> Tensor:
    """(entries, D) float32, of a table whose rows `tokens_N` were taken."""
    # A radix sort takes a pass for each 8 bits of the key.
    narrow = torch.int16 if entries <= 2**15 else torch.int32
    ids_N, order_N = torch.sort(tokens_N.to(narrow), stable=True)
    N, D = grad_ND.shape
    out = torch.zeros(entries, D, dtype=torch.float32, device=grad_ND.device)
    pieces = triton.cdiv(N, PIECE)
    first, last = (torch.empty(pieces, D, dtype=torch.float32, device=out.device) for _ in range(2))
    grid = (pieces, triton.cdiv(D, COLUMNS))
    add_runs[grid](grad_ND, ids_N, order_N, out, first, last, N, entries, D, PIECE, COLUMNS, num_warps=4)
    join_runs[grid](ids_N, out, first, last, N, entries, D, PIECE, SHARES, COLUMNS, num_warps=4)
    return out


@triton.jit
def _dequantize_int8(  # type: ignore[no-untyped-def]
    codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    scale = tl.load(scale_ptr + row, row < rows, 0.0)
    weight = tl.load(codes_ptr + at, inside, 0).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + at, weight.to(out_ptr.dtype.element_ty), inside)


def dequantize_int8(codes_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kernels.stored_weights.dequantize_int8`."""
    codes_RC, scale_R = codes_RC.contiguous(), scale_R.contiguous()
    rows, columns = codes_RC.shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes_RC.device)
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _dequantize_int8[grid](codes_RC, scale_R, out, rows, columns, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS)
    return out
