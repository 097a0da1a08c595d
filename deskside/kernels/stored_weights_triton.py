"""The kernels of `stored_weights.py` in Triton: embedding lookup to 16 bits, its gradient, and weights from codes.

The gradient of a table row is the sum over all tokens with that id, and token frequencies are as uneven as those of
words: one id may be a tenth of the tokens, and half of the ids may not occur. So the tokens are sorted by id and cut
into pieces of PIECE tokens. A piece sums its runs of equal ids by a product with a 0-1 matrix, on tensor cores with
float32 accumulation. The sum of a run within one piece is written directly to the gradient. A run across pieces leaves
one partial sum per piece, and a second kernel adds these. There are no atomics, so results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 64  # sorted tokens per program
COLUMNS = 128  # channels per program
PARTIAL_SUMS = 32  # pieces whose partial sums of a run are read per iteration
TILE_ROWS, TILE_COLUMNS = 8, 512  # of codes: 32 codes per thread, in loads of 16 bytes
# Rows of W in one program, few so that a matrix of 2,048 rows keeps a large GPU busy, and columns per iteration.
PRODUCT_ROWS, PRODUCT_COLUMNS = 16, 256


@triton.jit
def gather(  # type: ignore[no-untyped-def]
    TABLE, TOKENS, OUT, N, V,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the rows TOKENS (N,) of TABLE (V, D) to OUT (N, D), rounded. A token outside 0..V - 1 gives NaN."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(TOKENS + rows, mask=rows < N, other=0)
    valid = (token >= 0) & (token < V)
    column_mask = (columns < D)[None, :]
    x = tl.load(
        TABLE + token[:, None] * D + columns[None, :], mask=valid[:, None] & column_mask, other=float("nan")
    )
    out_ptrs = OUT + rows[:, None] * D + columns[None, :]
    tl.store(out_ptrs, x.to(OUT.dtype.element_ty), mask=(rows < N)[:, None] & column_mask)


@triton.jit
def add_runs(  # type: ignore[no-untyped-def]
    GRAD, IDS, ORDER, OUT, FIRST, LAST, N, V,
    D: tl.constexpr, PIECE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the rows ORDER (N,) of GRAD (N, D) over each run of equal IDS (N,), which are sorted, into OUT (V, D).

    FIRST, LAST: (pieces, D), partial sums of runs across pieces. FIRST: of a piece's first run, if it began in an
    earlier piece. LAST: of its last run, if it began in this piece and continues in the next.
    """
    piece = tl.program_id(0)
    positions = piece * PIECE + tl.arange(0, PIECE)
    mask = positions < N
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    column_mask = (columns < D)[None, :]
    row = tl.load(ORDER + positions, mask=mask, other=0)
    grad = tl.load(GRAD + row[:, None] * D + columns[None, :], mask=mask[:, None] & column_mask, other=0.0)
    ids = tl.load(IDS + positions, mask=mask, other=-1).to(tl.int32)
    previous_ids = tl.load(IDS + positions - 1, mask=mask & (positions > 0), other=-1).to(tl.int32)
    next_ids = tl.load(IDS + positions + 1, mask=positions + 1 < N, other=-1).to(tl.int32)
    slot = tl.arange(0, PIECE)
    run_of = tl.cumsum(((ids != previous_ids) & (slot > 0)).to(tl.int32), axis=0)
    in_run = run_of[None, :] == slot[:, None]  # (runs, tokens)
    sums = tl.dot(in_run.to(grad.dtype), grad)
    # Of each run: its id, whether it continues a run of the previous piece, and whether the next piece continues it.
    run_id = tl.max(tl.where(in_run, ids[None, :], -1), axis=1)
    continues = (mask & (slot == 0) & (ids == previous_ids)).to(tl.int32)
    continued = (mask & (slot == PIECE - 1) & (ids == next_ids)).to(tl.int32)
    first = tl.max(tl.where(in_run, continues[None, :], 0), axis=1) > 0
    last = (tl.max(tl.where(in_run, continued[None, :], 0), axis=1) > 0) & (first == 0)
    complete = (run_id >= 0) & (run_id < V) & (first == 0) & (last == 0)
    tl.store(
        OUT + run_id.to(tl.int64)[:, None] * D + columns[None, :], sums, mask=complete[:, None] & column_mask
    )
    partial_offsets = piece.to(tl.int64) * D + columns[None, :] + slot[:, None] * 0
    tl.store(FIRST + partial_offsets, sums, mask=first[:, None] & column_mask)
    tl.store(LAST + partial_offsets, sums, mask=last[:, None] & column_mask)


@triton.jit
def join_runs(  # type: ignore[no-untyped-def]
    IDS, OUT, FIRST, LAST, N, V,
    D: tl.constexpr, PIECE: tl.constexpr, PARTIAL_SUMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write to OUT (V, D) the sum of the run that begins in this program's piece and continues in the next, if any."""
    piece = tl.program_id(0)
    start = piece * PIECE
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    run_id = tl.load(IDS + start + PIECE - 1, mask=start + PIECE < N, other=-1).to(tl.int32)
    next_id = tl.load(IDS + start + PIECE, mask=start + PIECE < N, other=-2).to(tl.int32)
    previous_id = tl.load(IDS + start - 1, mask=start > 0, other=-1).to(tl.int32)
    if (run_id == next_id) & (run_id != previous_id) & (run_id >= 0) & (run_id < V):
        total = tl.load(LAST + piece.to(tl.int64) * D + columns, mask=columns < D, other=0.0)
        pieces = piece + 1 + tl.arange(0, PARTIAL_SUMS)
        continues = 1
        while continues > 0:
            first_id = tl.load(IDS + pieces * PIECE, mask=pieces * PIECE < N, other=-1).to(tl.int32)
            same_run = first_id == run_id
            ptrs = FIRST + pieces.to(tl.int64)[:, None] * D + columns[None, :]
            total += tl.sum(tl.load(ptrs, mask=same_run[:, None] & (columns < D)[None, :], other=0.0), axis=0)
            continues = tl.min(same_run.to(tl.int32), axis=0)
            pieces += PARTIAL_SUMS
        tl.store(OUT + run_id.to(tl.int64) * D + columns, total, mask=columns < D)


def embedding(tokens_N: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of the table, (N, D) in `dtype`."""
    (N,), (V, D) = tokens_N.shape, weight_VD.shape
    out = torch.empty(N, D, dtype=dtype, device=weight_VD.device)
    grid = (triton.cdiv(N, 16), triton.cdiv(D, 256))
    gather[grid](weight_VD, tokens_N, out, N, V, D, 16, 256, num_warps=4)
    return out


def embedding_gradient(grad_ND: Tensor, tokens_N: Tensor, entries: int) -> Tensor:
    """Return the gradient (entries, D) float32 of a table from that of its rows `tokens_N`."""
    # A narrow key is faster: a radix sort takes one pass for every 8 bits of it.
    key_dtype = torch.int16 if entries <= 2**15 else torch.int32
    ids_N, order_N = torch.sort(tokens_N.to(key_dtype), stable=True)
    N, D = grad_ND.shape
    out = torch.zeros(entries, D, dtype=torch.float32, device=grad_ND.device)
    pieces = triton.cdiv(N, PIECE)
    first, last = (torch.empty(pieces, D, dtype=torch.float32, device=out.device) for _ in range(2))
    grid = (pieces, triton.cdiv(D, COLUMNS))
    add_runs[grid](grad_ND, ids_N, order_N, out, first, last, N, entries, D, PIECE, COLUMNS, num_warps=4)
    join_runs[grid](ids_N, out, first, last, N, entries, D, PIECE, PARTIAL_SUMS, COLUMNS, num_warps=4)
    return out


@triton.jit
def _dequantize_rows(  # type: ignore[no-untyped-def]
    codes_ptr, scale_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row[:, None] * columns + column[None, :]
    scale = tl.load(scale_ptr + row, row < rows, 0.0)
    weight = tl.load(codes_ptr + offsets, mask).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + offsets, weight.to(out_ptr.dtype.element_ty), mask)


def dequantize_rows(codes_RC: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """See `kernels.stored_weights.dequantize_rows`."""
    codes_RC, scale_R = codes_RC.contiguous(), scale_R.contiguous()
    rows, columns = codes_RC.shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes_RC.device)
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    _dequantize_rows[grid](codes_RC, scale_R, out, rows, columns, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS)
    return out


@triton.jit
def _few_rows(  # type: ignore[no-untyped-def]
    X, CODES, SCALE, OUT, N, R, C,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X: (N, C), all rows in one tile. CODES: (R, C), of which a program reads BLOCK_R rows. OUT: (N, R)."""
    n = tl.arange(0, BLOCK_N)
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_C)
    out = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + columns
        x = tl.load(X + n[:, None] * C + c[None, :], mask=(n < N)[:, None] & (c < C)[None, :], other=0.0)
        # Unread codes meet zeros of X; rows beyond R are not stored.
        code = tl.load(CODES + r[:, None] * C + c[None, :], mask=(r < R)[:, None] & (c < C)[None, :])
        code = tl.where((c < C)[None, :], code.to(tl.float32), 0.0).to(x.dtype)
        out += tl.dot(x, tl.trans(code), input_precision=PRECISION)
    scale = tl.load(SCALE + r, mask=r < R, other=0.0)
    mask = (n < N)[:, None] & (r < R)[None, :]
    tl.store(OUT + n[:, None] * R + r[None, :], (out * scale[None, :]).to(OUT.dtype.element_ty), mask=mask)


def few_rows_product(x_NC: Tensor, codes_RC: Tensor, scale_R: Tensor) -> Tensor:
    """See `kernels.stored_weights.linear_from_codes`; for at most MAX_FEW_ROWS rows of x."""
    (N, C), R = x_NC.shape, len(codes_RC)
    out_NR = torch.empty(N, R, dtype=x_NC.dtype, device=x_NC.device)
    # Products in full float32 run outside of the tensor cores, and spill registers with more columns or fewer warps.
    precision, columns, warps = (
        ("ieee", 128, 8) if x_NC.dtype == torch.float32 else ("tf32", PRODUCT_COLUMNS, 4)
    )
    _few_rows[(triton.cdiv(R, PRODUCT_ROWS),)](
        x_NC.contiguous(), codes_RC.contiguous(), scale_R.contiguous(), out_NR, N, R, C,
        max(16, triton.next_power_of_2(N)), PRODUCT_ROWS, columns, precision,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out_NR
