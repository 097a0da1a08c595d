"""Casts of sorted rows, of their gates and of expert weights to E4M3, in plain torch: for CPUs, and the reference of
the kernels.

A scale must be constant along the dimension that a product sums over. The output and the input gradient sum over the
columns of the sorted rows, so each row has a scale. The weight gradient sums over the rows of an expert, so these have
one scale. The output sums over the columns of an expert's weight too, the input gradient over its rows, so the form for
the input gradient has a scale for each pair of expert and column. What is summed over rows is stored transposed,
because tensor cores need a contiguous summed dimension.

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


def cast_rows(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Cast the rows of x with a scale per row. Returns E4M3 (N, K) and 1 / scale (N,)."""
    x_NK = x_NK.float()
    scale_N = scale_for(_magnitude(x_NK).amax(1))
    return _to_e4m3(x_NK * scale_N[:, None]), scale_N.reciprocal()


def dispatch_fp8(x_NK: Tensor, slots_Nk: Tensor, tokens_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cast_rows` of the tokens x in sorted order, with zeros for padding: E4M3 (S, K) and 1 / scale (S,).

    slots_Nk, tokens_S: see `reference.Routing`. The kernel reads and casts each token once and writes it k times, so it
    needs the rows of each token; this reference needs only the token of each row.
    """
    return cast_rows(_gathered(x_NK, tokens_S))


def transpose_rows(rows_SK: Tensor, inverse_S: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose rows of `cast_rows` for the weight gradient, which sums over the rows of each expert.

    All rows of an expert get the scale of its row with the largest magnitude. Scales are powers of two, so only values
    that become smaller than the smallest normal number of E4M3 are rounded. Returns E4M3 (K, S) and 1 / scale (E,).
    """
    experts_S, inverse_E = experts_of_rows(ends_E, len(inverse_S)), _largest(inverse_S, ends_E)
    return _to_e4m3(rows_SK.float() * (inverse_S / inverse_E[experts_S])[:, None]).T.contiguous(), inverse_E


def dispatch_columns(
    x_NK: Tensor, tokens_S: Tensor, inverse_S: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sorted rows of tokens x, with zeros for padding, cast for the weight gradient as `transpose_rows`.

    inverse_S: of an earlier `dispatch_fp8` of x. Values are rounded once. Returns E4M3 (K, S) and 1 / scale (E,).
    """
    experts_S, inverse_E = experts_of_rows(ends_E, len(inverse_S)), _largest(inverse_S, ends_E)
    scaled_SK = _gathered(x_NK, tokens_S) * inverse_E.reciprocal()[experts_S, None]
    return _to_e4m3(scaled_SK).T.contiguous(), inverse_E


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


def _gathered(x_NK: Tensor, tokens_S: Tensor) -> Tensor:
    return x_NK[tokens_S.long()].float().masked_fill((tokens_S < 0)[:, None], 0.0)


def _largest(inverse_S: Tensor, ends_E: Tensor) -> Tensor:
    """Return the largest value of each expert (E,)."""
    experts_S = experts_of_rows(ends_E, len(inverse_S))
    return inverse_S.new_zeros(len(ends_E)).scatter_reduce(0, experts_S, inverse_S, "amax")


def _magnitude(x: Tensor) -> Tensor:
    """Return |x| with NaN replaced by infinity."""
    return x.abs().nan_to_num(nan=float("inf"), posinf=float("inf"))


def _to_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
