"""Matrix products with a symmetric result, in Triton: half of the tiles are computed, and each is written twice."""

import triton
import triton.language as tl
from torch import Tensor

from deskside.kernels.fused.launch import capability

# Side of a tile, depth of one step of the product, stages, warps. Operands in flight: 3 x 2 x 128 x 64 values of
# float16 are 96 KiB, of the 99 that a block may have on a consumer card.
SIDE, DEPTH, STAGES, WARPS = 128, 64, 3, 4
WARPS_10 = 8  # on compute capability 10.x, where four warps spill registers; not measured there
DEPTH_FLOAT32 = 32


@triton.jit
def _symmetric_product(  # type: ignore[no-untyped-def]
    P, R, ADDEND, OUT, alpha, beta, gamma, ROWS, N,
    EVEN: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one matrix and write it twice. P, R: (batch, ROWS, N). ADDEND, OUT: (batch, N, N).

    EVEN: N is a multiple of SIDE, and ROWS of DEPTH.
    """
    # Tile t of the lower triangle, counted by rows: 0; 1, 2; 3, 4, 5. The root may be off by one.
    t = tl.program_id(0)
    i = ((tl.sqrt(8.0 * t + 1) - 1) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    row = i * SIDE + tl.arange(0, SIDE)
    column = j * SIDE + tl.arange(0, SIDE)
    k = tl.arange(0, DEPTH)
    p_ptrs = P + matrix * ROWS * N + row[:, None] + k[None, :] * N
    r_ptrs = R + matrix * ROWS * N + k[:, None] * N + column[None, :]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for _ in range(tl.cdiv(ROWS, DEPTH)):
        if EVEN:
            p = tl.load(p_ptrs)
            r = tl.load(r_ptrs)
        else:
            p = tl.load(p_ptrs, (row < N)[:, None] & (k < ROWS)[None, :], 0.0)
            r = tl.load(r_ptrs, (k < ROWS)[:, None] & (column < N)[None, :], 0.0)
            k += DEPTH
        total = tl.dot(p, r, total, input_precision="ieee")
        p_ptrs += DEPTH * N
        r_ptrs += DEPTH * N
    total *= alpha
    row_out, column_out = row[:, None], column[None, :]
    mask = (row_out < N) & (column_out < N)
    first = matrix * N * N
    if ADDEND is not None:
        total += beta * tl.load(ADDEND + first + row_out * N + column_out, mask, 0.0).to(tl.float32)
        total += tl.where(row_out == column_out, gamma, 0.0)
    out = total.to(OUT.dtype.element_ty)
    tl.store(OUT + first + row_out * N + column_out, out, mask)
    if i != j:
        tl.store(OUT + first + column_out * N + row_out, out, mask)


def symmetric_product(
    p: Tensor,
    r: Tensor,
    out: Tensor,
    alpha: float = 1.0,
    addend: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> None:
    """Write alpha p^T r + beta addend + gamma I, which must be symmetric, to `out`, which must be another tensor.

    p, r: (batch, rows, n). addend, out: (batch, n, n). All are contiguous. gamma is not used without an addend.
    """
    batch, rows, n = p.shape
    depth = DEPTH if p.element_size() == 2 else DEPTH_FLOAT32
    tiles = triton.cdiv(n, SIDE)
    warps = WARPS_10 if capability(p.device)[0] == 10 else WARPS
    _symmetric_product[(tiles * (tiles + 1) // 2, batch)](
        p, r, addend, out, alpha, beta, gamma, rows, n,
        EVEN=n % SIDE == 0 and rows % depth == 0, SIDE=SIDE, DEPTH=depth, num_stages=STAGES, num_warps=warps,
    )  # fmt: skip
