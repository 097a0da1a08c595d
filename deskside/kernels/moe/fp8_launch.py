"""Launches of the casts of sorted rows and expert weights to E4M3. Imported only for tensors on a GPU."""

import torch
from torch import Tensor

from deskside.kernels.fused.launch import ceil_div, next_power_of_2
from deskside.kernels.moe import triton_fp8

AMAX_TILE, CAST_TILE = (128, 64), (64, 128)  # rows and columns


def cast_rows(x_NK: Tensor, tokens_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_rows`. x_NK: contiguous."""
    (rows, K), device = x_NK.shape, x_NK.device
    rows = rows if tokens_S is None else len(tokens_S)
    out = torch.empty(rows, K, dtype=torch.float8_e4m3fn, device=device)
    inverse = torch.empty(rows, dtype=torch.float32, device=device)
    block = min(max(next_power_of_2(K), 512), 2048)  # each of 128 threads converts four values at a time
    triton_fp8.cast_rows[(rows,)](x_NK, tokens_S, out, inverse, K, tokens_S is not None, block, num_warps=4)
    return out, inverse


def cast_columns(x_NK: Tensor, tokens_S: Tensor | None, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_columns`. x_NK: contiguous."""
    rows, K = len(x_NK) if tokens_S is None else len(tokens_S), x_NK.shape[1]
    out = torch.empty(K, rows, dtype=torch.float8_e4m3fn, device=x_NK.device)
    return out, _cast_columns(x_NK, tokens_S, ends_E, out, (rows // 4, 0))


def cast_weight_columns(weight_EMK: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_weight_columns`. weight_EMK: contiguous; M is a multiple of four."""
    (E, M, K), device = weight_EMK.shape, weight_EMK.device
    ends = torch.arange(M, E * M + 1, M, dtype=torch.int32, device=device)
    out = torch.empty(E, K, M, dtype=torch.float8_e4m3fn, device=device)
    words = M // 4
    # An expert has K columns of `words` words, `words` of which are already in the number of its first row.
    return out, _cast_columns(weight_EMK.view(E * M, K), None, ends, out, (words, (K - 1) * words))


def _cast_columns(
    x_NK: Tensor, tokens_S: Tensor | None, ends_E: Tensor, out: Tensor, words: tuple[int, int]
) -> Tensor:
    """Write `out` and return the inverse scales (E, K). words: `column_words` and `expert_words` of the kernel."""
    rows, K = len(x_NK) if tokens_S is None else len(tokens_S), x_NK.shape[1]
    E, gathered = len(ends_E), tokens_S is not None
    block_e = max(next_power_of_2(E), 2)
    amax, inverse = torch.zeros(2, E, K, dtype=torch.float32, device=x_NK.device)
    grids = [(ceil_div(rows, tile[0]), ceil_div(K, tile[1])) for tile in (AMAX_TILE, CAST_TILE)]
    triton_fp8.column_amax[grids[0]](
        x_NK, tokens_S, ends_E, amax, rows, K, E, gathered, *AMAX_TILE, block_e, num_warps=4
    )
    triton_fp8.cast_columns[grids[1]](
        x_NK, tokens_S, ends_E, amax, out.view(torch.int32), inverse, rows, K, *words, E, gathered, *CAST_TILE,
        block_e, num_warps=4,
    )  # fmt: skip
    return inverse
