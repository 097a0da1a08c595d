"""Launches of the casts of sorted rows and expert weights to E4M3. Imported only for tensors on a GPU."""

import torch
from torch import Tensor

from deskside.kernels.fused.launch import ACTIVATION_IDS, ceil_div, next_power_of_2
from deskside.kernels.moe import triton_fp8, triton_gated_fp8

# Rows and columns of a tile, and warps. A transposed column of a tile is BLOCK_S contiguous bytes.
Tile = tuple[int, int, int]
AMAX_TILE: Tile = (128, 64, 4)
CAST_TILE: Tile = (128, 64, 4)
BOTH_TILE: Tile = (128, 64, 4)
GATED_AMAX_TILE: Tile = (16, 128, 4)
GATED_CAST_TILE: Tile = (64, 64, 8)
GATE_BLOCK = 4096  # columns of a row that a program holds
ALIGN = 16  # rows: each expert has a multiple


def cast_rows(x_NK: Tensor, tokens_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_rows`. x_NK: contiguous."""
    rows, K = len(x_NK) if tokens_S is None else len(tokens_S), x_NK.shape[1]
    return _cast_rows(x_NK, tokens_S, None, rows, K)


def gather_and_cast(x_NK: Tensor, tokens_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `fp8_rows.gather_and_cast`. x_NK: contiguous."""
    rows, K = len(tokens_S), x_NK.shape[1]
    copy = torch.empty(rows, K, dtype=x_NK.dtype, device=x_NK.device)
    return copy, *_cast_rows(x_NK, tokens_S, copy, rows, K)


def _cast_rows(
    x: Tensor, tokens_S: Tensor | None, copy: Tensor | None, rows: int, K: int
) -> tuple[Tensor, Tensor]:
    out, inverse = _e4m3(rows, K, device=x.device), _float32(rows, device=x.device)
    block = min(max(next_power_of_2(K), 512), 2048)  # each of 128 threads converts four values at a time
    triton_fp8.cast_rows[(rows,)](
        x, tokens_S, out, inverse, copy, K, tokens_S is not None, copy is not None, block, num_warps=4
    )
    return out, inverse


def cast_columns(x_NK: Tensor, tokens_S: Tensor | None, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_columns`. x_NK: contiguous."""
    return _cast_sorted(x_NK, tokens_S, ends_E, rows_too=False)[2:]


def cast_both(x_NK: Tensor, tokens_S: Tensor | None, ends_E: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fp8_rows.cast_both`. x_NK: contiguous."""
    rows, row_inverse, columns, column_inverse = _cast_sorted(x_NK, tokens_S, ends_E, rows_too=True)
    assert rows is not None and row_inverse is not None
    return rows, row_inverse, columns, column_inverse


def _cast_sorted(
    x_NK: Tensor, tokens_S: Tensor | None, ends_E: Tensor, rows_too: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    S, K, E, device = (
        len(x_NK) if tokens_S is None else len(tokens_S),
        x_NK.shape[1],
        len(ends_E),
        x_NK.device,
    )
    rows = _e4m3(S, K, device=device) if rows_too else None
    row_inverse = _float32(S, device=device) if rows_too else None
    columns, column_inverse = _e4m3(K, S, device=device), _float32(E, K, device=device)
    out = rows, columns.view(torch.int32), row_inverse, column_inverse
    _launch_casts(x_NK, tokens_S, ends_E, out, (S, S, 0), ALIGN)
    return rows, row_inverse, columns, column_inverse


def cast_weight_columns(weight_EMK: Tensor) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.cast_weight_columns`. weight_EMK: contiguous; M is a multiple of four."""
    (E, M, K), device = weight_EMK.shape, weight_EMK.device
    ends = torch.arange(M, E * M + 1, M, dtype=torch.int32, device=device)
    columns, inverse = _e4m3(E, K, M, device=device), _float32(E, K, device=device)
    # An expert has K columns of M values, M of which are already in the number of its first row.
    sizes, align = (E * M, M, (K - 1) * M), ALIGN if M % ALIGN == 0 else 4
    out = None, columns.view(torch.int32), None, inverse
    _launch_casts(weight_EMK.view(E * M, K), None, ends, out, sizes, align)
    return columns, inverse


def _launch_casts(
    x: Tensor,
    tokens_S: Tensor | None,
    ends_E: Tensor,
    out: tuple[Tensor | None, Tensor, Tensor | None, Tensor],
    sizes: tuple[int, int, int],
    align: int,
) -> None:
    """Write `out`: rows, words and the inverse scales of both. sizes: sorted rows, `pitch` and `expert_pitch`."""
    (S, *pitches), K, E, has_rows = sizes, x.shape[1], len(ends_E), out[0] is not None
    bits = torch.zeros(E * K + (S if has_rows else 0), dtype=torch.int32, device=x.device)
    inputs = x, tokens_S, ends_E, bits[E * K :] if has_rows else None, bits
    flags = tokens_S is not None, has_rows
    *tile, warps = AMAX_TILE
    triton_fp8.sorted_amax[(_row_tiles(S, E, tile[0]) * ceil_div(K, tile[1]),)](
        *inputs, K, E, *flags, *tile, _experts_block(E), num_warps=warps
    )
    *tile, warps = BOTH_TILE if has_rows else CAST_TILE
    triton_fp8.sorted_cast[(_row_tiles(S, E, tile[0]) * ceil_div(K, tile[1]),)](
        *inputs, *out, K, E, *pitches, *flags, align, *tile, _experts_block(E), num_warps=warps
    )


def weighted_gated_fp8(
    x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor]:
    """See `fp8_rows.weighted_gated_fp8`. x: contiguous."""
    S, F = len(x), x.shape[1] // (2 if has_gate else 1)
    out, inverse = _e4m3(S, F, device=x.device), _float32(S, device=x.device)
    block = min(max(next_power_of_2(F), 512), GATE_BLOCK)
    triton_gated_fp8.weighted_gated_fp8[(S,)](
        x, weights_S, out, inverse, S, F, ACTIVATION_IDS[activation], has_gate, block,
        num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return out, inverse


def weighted_gated_backward_rows(
    grad: Tensor, x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `fp8_rows.weighted_gated_backward_rows`. grad, x: contiguous."""
    S, F = grad.shape
    grad_x, hidden, grad_weights = torch.empty_like(x), torch.empty_like(grad), torch.empty_like(weights_S)
    rows, inverse = _e4m3(*x.shape, device=x.device), _float32(S, device=x.device)
    block = max(next_power_of_2(F), 512)
    triton_gated_fp8.gated_backward_rows[(S,)](
        grad, x, weights_S, grad_x, grad_weights, hidden, rows, inverse, S, F,
        ACTIVATION_IDS[activation], has_gate, block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return grad_x, rows, inverse, grad_weights, hidden


def weighted_gated_backward_fp8(
    grad: Tensor, x: Tensor, weights_S: Tensor, ends_E: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `fp8_rows.weighted_gated_backward_fp8`. grad, x: contiguous."""
    (S, F), width, E, device = grad.shape, x.shape[1], len(ends_E), x.device
    bits = torch.zeros(E, width + F, dtype=torch.int32, device=device)
    column_bits, hidden_bits = bits.flatten().split([E * width, E * F])
    row_bits = torch.empty(S, dtype=torch.int32, device=device)
    grad_weights = torch.empty_like(weights_S)
    kind, block_e = ACTIVATION_IDS[activation], _experts_block(E)
    inputs, found = (grad, x, weights_S, ends_E), (row_bits, column_bits, hidden_bits)
    *tile, warps = GATED_AMAX_TILE
    triton_gated_fp8.gated_backward_amax[(_row_tiles(S, E, tile[0]),)](
        *inputs, grad_weights, *found, F, E, kind, has_gate, *tile, block_e, num_warps=warps
    )
    rows, columns, hidden = (_e4m3(*shape, device=device) for shape in ((S, width), (width, S), (F, S)))
    inverses = [_float32(*shape, device=device) for shape in ((S,), (E, width), (E, F))]
    words = columns.view(torch.int32), hidden.view(torch.int32)
    *tile, warps = GATED_CAST_TILE
    triton_gated_fp8.gated_backward_cast[(_row_tiles(S, E, tile[0]) * ceil_div(F, tile[1]),)](
        *inputs,
        *found,
        rows,
        *words,
        *inverses,
        S,
        F,
        E,
        kind,
        has_gate,
        ALIGN,
        *tile,
        block_e,
        num_warps=warps,
    )
    return rows, inverses[0], columns, inverses[1], hidden, inverses[2], grad_weights


def _row_tiles(rows: int, experts: int, block: int) -> int:
    """Return the largest number of tiles of one expert's rows that any routing needs."""
    return rows // block + experts


def _experts_block(experts: int) -> int:
    return max(next_power_of_2(experts), 2)


def _e4m3(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)


def _float32(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)
