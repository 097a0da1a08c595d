"""Launches of the fused Triton kernels: output tensors, grids and tile sizes. Imported only for tensors on a GPU.

The tiles of kernels that compute sums are fixed: they were chosen on an H200 (docs/log.md) and keep within the shared
memory of consumer cards. Those of the other kernels are in `tiles.py`.

Where a cast with one scale also writes a transposed copy, the tiles of one row block have consecutive program ids, so
that programs running at the same time read whole rows.
"""

from functools import cache

import torch
from torch import Tensor

from deskside.kernels.fused import triton_cast, triton_gated, triton_norm, triton_rope
from deskside.kernels.fused.reference import Angles, Cast, Fp8, QkvLayout
from deskside.kernels.fused.tiles import tile_of
from deskside.utils.errors import UsageError

ACTIVATION_IDS = {"silu": 0, "gelu": 1, "gelu_new": 2, "relu2": 3}
FP8_ROWS = 64  # rows of a tile with a transposed copy, and so the bytes of each contiguous piece of the copy
NORM_ROWS = 32  # fewer, so that a program's rows are still in the cache for its second pass
# 2 use 32 KB of shared memory. 3 are 5 % faster than 2 with 768 channels, but 5 % slower with 2,048.
NORM_STAGES = 2
PROGRAMS_PER_SM = 16  # for kernels that keep sums in registers; enough to hide the latency of loads


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up. `triton.cdiv` takes 20 times as long on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _fp8(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Fp8:
    """Allocate an FP8 matrix (rows, columns) and its transpose."""
    rows, columns = shape
    if rows % 4:
        raise UsageError(
            f"a cast to FP8 processes four rows at a time and cannot take {rows}; use a multiple of 16 tokens"
        )
    return Fp8(
        torch.empty(rows, columns, dtype=dtype, device=device),
        torch.empty(columns, rows, dtype=dtype, device=device),
    )


def cast_fp8(x: Tensor, cast: Cast) -> Fp8:
    """See `reference.cast_fp8`. (N, K) -> rows (N, K) and columns (K, N)."""
    N, K = x.shape
    out = _fp8((N, K), cast.dtype, x.device)
    tile = tile_of("cast_fp8")
    grid = (ceil_div(K, tile.columns), ceil_div(N, tile.rows))
    triton_cast.cast_fp8[grid](
        x, out.rows, _transposed_words(out), cast.scale, cast.amax, N, K, tile.rows, tile.columns,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def row_col_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.row_col_amax`. (N, K) -> (N,) and (K,)."""
    N, K = x.shape
    rows, columns = (torch.zeros(size, dtype=torch.float32, device=x.device) for size in (N, K))
    tile = tile_of("row_col_amax")
    triton_cast.row_col_amax[(ceil_div(N, tile.rows), ceil_div(K, tile.columns))](
        x, rows, columns, N, K, tile.rows, tile.columns, num_warps=tile.num_warps
    )
    return rows, columns


def cast_both(x: Tensor, dtype: torch.dtype, row_scale: Tensor, column_scale: Tensor) -> Fp8:
    """See `reference.cast_both`. (N, K) -> rows (N, K) and columns (K, N)."""
    N, K = x.shape
    out = _fp8((N, K), dtype, x.device)
    tile = tile_of("cast_both")
    triton_cast.cast_both[(ceil_div(N, tile.rows), ceil_div(K, tile.columns))](
        x, out.rows, _transposed_words(out), row_scale, column_scale, N, K, tile.rows, tile.columns,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, cast: Cast | None = None
) -> tuple[Tensor, Tensor | Fp8, Tensor]:
    """See `reference.add_norm`. residual, delta: (N, D), contiguous."""
    N, D = residual.shape
    out = residual if delta is None else torch.empty_like(residual)
    rstd = torch.empty(N, dtype=torch.float32, device=residual.device)
    if cast is None:
        block = next_power_of_2(D)
        rows = max(1, 4096 // block)
        normed = torch.empty_like(residual)
        triton_norm.add_norm[(ceil_div(N, rows),)](
            residual, delta, weight, out, normed, rstd, N, eps, D, rows, block, delta is not None,
            num_warps=4 if rows * block <= 4096 else 8,
        )  # fmt: skip
        return out, normed, rstd
    fp8 = _fp8((N, D), cast.dtype, residual.device)
    triton_norm.add_norm_fp8[(ceil_div(N, NORM_ROWS),)](
        residual, delta, weight, out, fp8.rows, _transposed_words(fp8), rstd, cast.scale, cast.amax, N, eps,
        D, NORM_ROWS, 256, delta is not None, NORM_STAGES, num_warps=8,
    )  # fmt: skip
    return out, fp8, rstd


def add_norm_backward(
    grad_normed: Tensor, residual_out: Tensor, rstd: Tensor, weight: Tensor, grad_residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `reference.add_norm_backward`. All but rstd (N,) and weight (D,) are (N, D) and contiguous."""
    N, D = residual_out.shape
    grad = torch.empty_like(residual_out)
    block = next_power_of_2(D)
    rows = max(1, 2048 // block)
    programs = min(PROGRAMS_PER_SM * multiprocessors(residual_out.device), ceil_div(N, rows))
    rows_per_program = ceil_div(N, programs)
    sums = torch.empty(programs, D, dtype=torch.float32, device=grad.device)
    triton_norm.add_norm_backward[(programs,)](
        grad_normed, residual_out, rstd, weight, grad_residual, grad, sums, N, rows_per_program,
        D, rows, block, grad_residual is not None, num_warps=max(1, rows * block // 1024),
    )  # fmt: skip
    return grad, column_sums(sums[:, None], 1)[0]


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    angles: Angles,
    layout: QkvLayout,
) -> tuple[Tensor, Tensor]:
    """See `reference.qk_norm_rope`. qkv: (N, width), contiguous."""
    N, C = len(qkv), layout.head_dim
    q = torch.empty(N, layout.heads, C, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(N, layout.kv_heads, C, dtype=qkv.dtype, device=qkv.device)
    cos, sin = angles or (None, None)
    rows = max(16, 2048 // C)
    triton_rope.qk_norm_rope[(ceil_div(N, rows),)](
        qkv, q, k, q_weight, k_weight, cos, sin, N, 1 if cos is None else len(cos), layout.eps,
        layout.heads, layout.kv_heads, C, rows, q_weight is not None, angles is not None, num_warps=4,
    )  # fmt: skip
    return q, k


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    angles: Angles,
    layout: QkvLayout,
    cast: Cast | None = None,
) -> tuple[Tensor | Fp8, Tensor | None, Tensor | None]:
    """See `reference.qk_norm_rope_backward`. grads: of q, k and v, whose channels must be contiguous."""
    (N, width), C = qkv.shape, layout.head_dim
    rows = FP8_ROWS if cast is not None else max(16, 2048 // C)
    programs, heads = ceil_div(N, rows), layout.heads
    # Up to three heads per program: the largest number that divides both the query and the key heads.
    heads_per_program = next(n for n in (3, 2, 1) if heads % n == 0 and layout.kv_heads % n == 0)
    query_pieces = heads // heads_per_program
    key_pieces = layout.kv_heads // heads_per_program
    shape = (programs, query_pieces + key_pieces, C) if q_weight is not None else (0,)
    sums = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    cos, sin = angles or (None, None)
    inputs = (*grads, qkv, q_weight, k_weight, cos, sin)
    strides = [stride for g in grads for stride in g.stride()[:2]]
    sums_and_scalars = (sums, N, 1 if cos is None else len(cos), layout.eps, *strides)
    constants = (heads, layout.kv_heads, C, rows, heads_per_program, q_weight is not None, angles is not None)
    grid = (programs * (width // C // heads_per_program),)
    out: Tensor | Fp8
    if cast is None:
        out = torch.empty_like(qkv)
        triton_rope.qk_norm_rope_backward[grid](*inputs, out, *sums_and_scalars, *constants, num_warps=2)
    else:
        out = _fp8((N, width), cast.dtype, qkv.device)
        triton_rope.qk_norm_rope_backward_fp8[grid](
            *inputs,
            out.rows,
            _transposed_words(out),
            cast.scale,
            cast.amax,
            *sums_and_scalars,
            *constants,
            num_warps=max(2, C // 32),
        )
    if q_weight is None:
        return out, None, None
    grad_q_weight, grad_k_weight = column_sums(sums, query_pieces)
    return out, grad_q_weight, grad_k_weight


def column_sums(x: Tensor, num_first: int) -> Tensor:
    """(N, pieces, C) float32 -> (1 or 2, C): the sums over N of the first `num_first` pieces, and of any others."""
    N, pieces, C = x.shape
    outputs = 1 if num_first == pieces else 2
    out = torch.empty(outputs, C, dtype=torch.float32, device=x.device)
    triton_norm.column_sums[(ceil_div(C, 8), outputs)](
        x, out, N, C, num_first, pieces, min(1024, next_power_of_2(N)), 8, num_warps=8,
    )  # fmt: skip
    return out


def gated(x: Tensor, activation: str, has_gate: bool, cast: Cast | None = None) -> Tensor | Fp8:
    """See `reference.gated`. (N, 2F) or (N, F) -> (N, F)."""
    N, F = len(x), x.shape[1] // (2 if has_gate else 1)
    if cast is None:
        out = torch.empty(N, F, dtype=x.dtype, device=x.device)
        tile = tile_of("gated")
        grid = (ceil_div(N, tile.rows), ceil_div(F, tile.columns))
        triton_gated.gated[grid](
            x, out, N, F, ACTIVATION_IDS[activation], has_gate, tile.rows, tile.columns,
            num_warps=tile.num_warps,
        )  # fmt: skip
        return out
    tile = tile_of("gated_fp8")
    grid = (ceil_div(F, tile.columns), ceil_div(N, tile.rows))
    fp8 = _fp8((N, F), cast.dtype, x.device)
    triton_gated.gated_fp8[grid](
        x, fp8.rows, _transposed_words(fp8), cast.scale, cast.amax, N, F, ACTIVATION_IDS[activation], has_gate,
        tile.rows, tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip
    return fp8


def gated_backward(
    grad: Tensor, x: Tensor, activation: str, has_gate: bool, cast: Cast | None = None
) -> Tensor | Fp8:
    """See `reference.gated_backward`. grad (N, F) -> (N, 2F) or (N, F)."""
    N, F = grad.shape
    if cast is None:
        out = torch.empty_like(x)
        tile = tile_of("gated_backward")
        grid = (ceil_div(N, tile.rows), ceil_div(F, tile.columns))
        triton_gated.gated_backward[grid](
            grad, x, out, N, F, ACTIVATION_IDS[activation], has_gate, tile.rows, tile.columns,
            num_warps=tile.num_warps,
        )  # fmt: skip
        return out
    tile = tile_of("gated_backward_fp8")
    grid = (ceil_div(F, tile.columns), ceil_div(N, tile.rows))
    fp8 = _fp8((N, x.shape[1]), cast.dtype, x.device)
    triton_gated.gated_backward_fp8[grid](
        grad, x, fp8.rows, _transposed_words(fp8), cast.scale, cast.amax, N, F, ACTIVATION_IDS[activation], has_gate,
        tile.rows, tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip
    return fp8


def transpose(rows: Tensor, out: Tensor) -> None:
    """See `reference.transpose`. rows: (N, K); out: (K, N), whose row stride may exceed N."""
    N, K = rows.shape
    grid, words = (ceil_div(N, 128), ceil_div(K, 128)), out.view(torch.int32)
    triton_cast.transpose[grid](rows.view(torch.uint8), words, N, K, words.stride(0), 128, 128, num_warps=8)


def _transposed_words(fp8: Fp8) -> Tensor:
    """Return a view of the transposed copy as int32, four FP8 values per word."""
    return fp8.columns.view(torch.int32)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU, or 4 for a CPU (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or 8.9 for a CPU (Triton's interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 9)
