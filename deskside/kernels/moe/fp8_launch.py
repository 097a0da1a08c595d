"""Launches of the casts of sorted rows, of the gate's results and of expert weights to E4M3. Imported only for tensors
on a GPU."""

import torch
from torch import Tensor

from deskside.kernels.fused.launch import ACTIVATION_IDS, ceil_div, next_power_of_2
from deskside.kernels.moe import triton_fp8

# Rows and columns of a tile, and warps. A transposed column of a tile is as many contiguous bytes as the tile has rows.
Tile = tuple[int, int, int]
AMAX_TILE: Tile = (128, 64, 4)
CAST_TILE: Tile = (256, 64, 8)
SMALLEST_BLOCK = 512  # columns of a row: each of 128 threads converts four values at a time
COLUMNS_PER_WARP = 512  # of the gate's rows


def cast_rows(x_NK: Tensor, tokens_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_rows`. x_NK: contiguous."""
    return _cast_rows(x_NK, tokens_S, None)


def gather_and_cast(x_NK: Tensor, tokens_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `fp8_rows.gather_and_cast`. x_NK: contiguous."""
    copy = torch.empty(len(tokens_S), x_NK.shape[1], dtype=x_NK.dtype, device=x_NK.device)
    return copy, *_cast_rows(x_NK, tokens_S, copy)


def _cast_rows(x: Tensor, tokens_S: Tensor | None, copy: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, K = len(x) if tokens_S is None else len(tokens_S), x.shape[1]
    out, inverse = _e4m3(rows, K, device=x.device), _float32(rows, device=x.device)
    block = min(max(next_power_of_2(K), SMALLEST_BLOCK), 2048)
    triton_fp8.cast_rows[(rows,)](
        x, tokens_S, out, inverse, copy, K, tokens_S is not None, copy is not None, block, num_warps=4
    )
    return out, inverse


def weighted_gated_fp8(
    x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.weighted_gated_fp8`. x: contiguous."""
    S, F = len(x), x.shape[1] // (2 if has_gate else 1)
    out, inverse = _e4m3(S, F, device=x.device), _float32(S, device=x.device)
    *blocks, warps = gate_blocks(F)
    triton_fp8.weighted_gated_fp8[(S,)](
        x, weights_S, out, inverse, F, ACTIVATION_IDS[activation], has_gate, *blocks, num_warps=warps
    )
    return out, inverse


def weighted_gated_backward_fp8(
    grad: Tensor, x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `fp8_rows.weighted_gated_backward_fp8`. grad, x: contiguous."""
    S, F = grad.shape
    grad_x, hidden, grad_weights = torch.empty_like(x), torch.empty_like(grad), torch.empty_like(weights_S)
    rows, inverse = _e4m3(*x.shape, device=x.device), _float32(S, device=x.device)
    *blocks, warps = gate_blocks(F)
    triton_fp8.weighted_gated_backward_fp8[(S,)](
        grad, x, weights_S, grad_x, grad_weights, hidden, rows, inverse, F,
        ACTIVATION_IDS[activation], has_gate, *blocks, num_warps=warps,
    )  # fmt: skip
    return grad_x, rows, inverse, grad_weights, hidden


def gate_blocks(F: int) -> tuple[int, int, int]:
    """Return the columns of the two pieces of a gate's row, which are powers of two or 0, and the number of warps.

    One piece would be up to twice as long as the row, and its instructions would take longer than the memory traffic.
    """
    block = max(next_power_of_2(F + 1) // 2, SMALLEST_BLOCK)
    warps = min(max(block // COLUMNS_PER_WARP, 4), 16)
    return block, max(next_power_of_2(F - block), 128 * warps) if block < F else 0, warps


def cast_weight_columns(weight_EMK: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_weight_columns`. weight_EMK: contiguous; M is a multiple of four."""
    (E, M, K), device = weight_EMK.shape, weight_EMK.device
    bits = torch.zeros(E, K, dtype=torch.int32, device=device)
    *tile, warps = AMAX_TILE
    triton_fp8.column_amax[(ceil_div(M, tile[0]) * ceil_div(K, tile[1]), E)](
        weight_EMK, bits, M, K, *tile, num_warps=warps
    )
    columns, inverse = _e4m3(E, K, M, device=device), _float32(E, K, device=device)
    *tile, warps = CAST_TILE
    triton_fp8.cast_columns[(ceil_div(M, tile[0]) * ceil_div(K, tile[1]), E)](
        weight_EMK, bits, columns.view(torch.int32), inverse, M, K, *tile, num_warps=warps
    )
    return columns, inverse


def _e4m3(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)


def _float32(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)
