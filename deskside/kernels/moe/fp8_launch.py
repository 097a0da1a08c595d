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
TRANSPOSED_TILE: Tile = (128, 128, 8)
SCALED_ROWS = 8192  # of an expert that are reduced at a time, by 32 warps
PADDED_ROWS = 32  # that a program searches for padding, a power of two
SMALLEST_BLOCK = 512  # columns of a row: each of 128 threads converts four values at a time
COLUMNS_PER_WARP = 512  # of the gate's rows


def cast_rows(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_rows`. x_NK: contiguous."""
    N, K = x_NK.shape
    out, inverse = _e4m3(N, K, device=x_NK.device), _float32(N, device=x_NK.device)
    triton_fp8.cast_rows[(N,)](x_NK, out, inverse, K, _row_block(K), num_warps=4)
    return out, inverse


def dispatch_fp8(x_NK: Tensor, slots_Nk: Tensor, tokens_S: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.dispatch_fp8`. x_NK: contiguous."""
    (N, K), S = x_NK.shape, len(tokens_S)
    out, inverse = _e4m3(S, K, device=x_NK.device), _float32(S, device=x_NK.device)
    triton_fp8.dispatch_fp8[(N + ceil_div(S, PADDED_ROWS),)](
        x_NK, slots_Nk, tokens_S, out, inverse, N, S, K, slots_Nk.shape[1], _row_block(K), PADDED_ROWS,
        num_warps=4,
    )  # fmt: skip
    return out, inverse


def _row_block(K: int) -> int:
    return min(max(next_power_of_2(K), SMALLEST_BLOCK), 2048)


def transpose_rows(rows_SK: Tensor, inverse_S: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.transpose_rows`. rows_SK: contiguous; S is a multiple of four."""
    return _transpose_rows(rows_SK, None, inverse_S, ends_E)


def dispatch_columns(
    x_NK: Tensor, tokens_S: Tensor, inverse_S: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.dispatch_columns`. x_NK: contiguous; S is a multiple of four."""
    return _transpose_rows(x_NK, tokens_S, inverse_S, ends_E)


def _transpose_rows(
    x: Tensor, tokens_S: Tensor | None, inverse_S: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    S, K, E, device = len(inverse_S), x.shape[1], len(ends_E), x.device
    inverse_E, factor_S = _float32(E, device=device), _float32(S, device=device)
    triton_fp8.scale_of_experts[(E,)](
        inverse_S, ends_E, inverse_E, factor_S, tokens_S is None, SCALED_ROWS, num_warps=32
    )
    columns = _e4m3(K, S, device=device)
    *tile, warps = TRANSPOSED_TILE
    groups = 1 if tokens_S is None else E
    blocks = ceil_div(ceil_div(S, tile[0]), groups) * groups
    triton_fp8.transpose_rows[(blocks * ceil_div(K, tile[1]),)](
        x,
        tokens_S,
        factor_S,
        columns.view(torch.int32),
        S,
        K,
        groups,
        tokens_S is not None,
        *tile,
        num_warps=warps,
    )
    return columns, inverse_E


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
    (S, F), device = grad.shape, x.device
    rows, inverse = _e4m3(*x.shape, device=device), _float32(S, device=device)
    hidden, hidden_inverse = _e4m3(S, F, device=device), _float32(S, device=device)
    grad_weights = torch.empty_like(weights_S)
    *blocks, warps = gate_blocks(F)
    triton_fp8.weighted_gated_backward_fp8[(S,)](
        grad, x, weights_S, rows, inverse, grad_weights, hidden, hidden_inverse, F,
        ACTIVATION_IDS[activation], has_gate, *blocks, num_warps=warps,
    )  # fmt: skip
    return rows, inverse, grad_weights, hidden, hidden_inverse


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
