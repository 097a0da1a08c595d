"""Casts of sorted rows, of their gates and of expert weights to E4M3, in plain torch: for CPUs, and the reference of
the kernels.

A scale must be constant along the dimension that a product sums over. The output and the input gradient sum over the
columns of the sorted rows, so each row has a scale. The weight gradient sums over the rows of an expert, so these have
one scale, and are stored transposed. The output sums over the columns of an expert's weight too, the
input gradient over its rows, so the form for the input gradient has a scale for each pair of expert and column. It is
stored transposed, because tensor cores need a contiguous summed dimension.

Scales are powers of two, as in torchao's training of experts: dequantized values are then exact in bfloat16, and an
ordinary grouped product in bfloat16 emulates the FP8 product, up to the order of its sums.

Suffixes: see `reference`; K columns, M rows of an expert's weight.
"""

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32
from deskside.kernels.moe.reference import weighted_gated, weighted_gated_backward

E4M3_LARGEST = 448.0
LARGEST_SCALE = 2.0**126  # whose inverse is a normal number
EXPONENT_BITS = 0x7F800000  # of a float32


def experts_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """Return the expert of each sorted row, (rows,) int64, without waiting for the device."""
    numbers = torch.arange(rows, dtype=ends_E.dtype, device=ends_E.device)
    return torch.searchsorted(ends_E, numbers, right=True)


def scale_for(amax: Tensor) -> Tensor:
    """Return the largest power of two up to LARGEST_SCALE that scales float32 amax to at most 448. 0 for infinity.

    Infinite values times 0 are NaN, which the product keeps.
    """
    scale = (E4M3_LARGEST / amax).clamp(max=LARGEST_SCALE)
    return (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)


def cast_rows(x_NK: Tensor, tokens_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cast the rows of x that `tokens_S` names, or all, with a scale per row. Returns E4M3 (S, K) and 1 / scale (S,).

    Padding (-1) is zeros.
    """
    x_SK = _gathered(x_NK, tokens_S)
    scale_S = scale_for(_magnitude(x_SK).amax(1))
    return _to_e4m3(x_SK * scale_S[:, None]), scale_S.reciprocal()


def transpose_rows(rows_SK: Tensor, inverse_S: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose rows of `cast_rows` for the weight gradient, which sums over the rows of each expert.

    All rows of an expert get the scale of its row with the largest magnitude. Scales are powers of two, so only values
    that become smaller than the smallest normal number of E4M3 are rounded. Returns E4M3 (K, S) and 1 / scale (E,).
    """
    experts_S, E = experts_of_rows(ends_E, len(inverse_S)), len(ends_E)
    inverse = inverse_S.new_zeros(E + 1).scatter_reduce(
        0, experts_S, inverse_S, "amax"
    )  # E: padding after the rows
    ratio_S = (inverse_S / inverse[experts_S]).masked_fill(experts_S == E, 0.0)
    return _to_e4m3(rows_SK.float() * ratio_S[:, None]).T.contiguous(), inverse[:E]


def weighted_gated_fp8(
    x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor]:
    """Return `reference.weighted_gated` cast from at least float32, with a scale per row, as `cast_rows` does."""
    return cast_rows(weighted_gated(x.to(at_least_float32(x)), weights_S, activation, has_gate))


def weighted_gated_backward_fp8(
    grad: Tensor, x: Tensor, weights_S: Tensor, activation: str, has_gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `reference.weighted_gated_backward`, the gradient of x and the hidden values in E4M3:

        gradient of x, 1 / its scales (S,), gradient of the weights, hidden values, 1 / their scales (S,)

    Both are cast from at least float32, with a scale per row, as `cast_rows` does.
    """
    wide = x.to(at_least_float32(x))
    grad_x, grad_weights_S, hidden = weighted_gated_backward(grad, wide, weights_S, activation, has_gate)
    return *cast_rows(grad_x), grad_weights_S, *cast_rows(hidden)


def cast_weight_columns(weight_EMK: Tensor) -> tuple[Tensor, Tensor]:
    """Cast weights with a scale per expert and column. Returns E4M3 (E, K, M), transposed, and 1 / scale (E, K)."""
    weight_EMK = weight_EMK.float()
    scale_EK = scale_for(_magnitude(weight_EMK).amax(1))
    return _to_e4m3(weight_EMK * scale_EK[:, None]).transpose(1, 2).contiguous(), scale_EK.reciprocal()


def _gathered(x_NK: Tensor, tokens_S: Tensor | None) -> Tensor:
    if tokens_S is None:
        return x_NK.float()
    return x_NK[tokens_S.long()].float().masked_fill((tokens_S < 0)[:, None], 0.0)


def _magnitude(x: Tensor) -> Tensor:
    """Return |x| with NaN replaced by infinity."""
    return x.abs().nan_to_num(nan=float("inf"), posinf=float("inf"))


def _to_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
