"""Weights of 24 bits: a bfloat16 weight, which is all that passes read, and an int8 residual for the update.

A weight that is rounded to bfloat16 in every step walks at random: after n steps, it differs from the weight of exact
updates by about 0.4 sqrt(n) rounding steps of 2^-8 to 2^-7 of its size. With 8 more bits, each step of this walk is 256
times smaller. (The split SGD of Kalamkar et al. 2020, arXiv 2005.04680, keeps the other 16 bits of float32.)

Here a 24-bit weight is a float32 whose last 8 bits are zero. Its bit pattern is an integer that grows with the
magnitude, through all binades:

    float32 pattern = (bfloat16 pattern << 16) + (residual << 8),   residual from -128 to 127

so that the bfloat16 weight is the nearest one, away from zero if two are equally near, and joining both is exact.
A residual is valid only with its weight: if a weight is written alone, joining it with the old residual may give NaN,
for example 0 with -5.
Finite values beyond the largest such pattern become that pattern. Infinity and NaN have a residual of 0.
"""

import torch
from torch import Tensor

from deskside.kernels.stochastic_rounding import random_bits, round_to_bfloat16

LARGEST = 0x7F7F7F00  # pattern of the largest finite weight: the largest bfloat16 and a residual of 127
MAGNITUDE = 0x7FFFFFFF


def joined(p: Tensor, residual: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights that bfloat16 weights and their residuals represent, in this dtype; without residuals, p."""
    if residual is None:
        return p.to(dtype)
    bits = p.float().view(torch.int32) + (residual.to(torch.int32) << 8)
    return bits.view(torch.float32).to(dtype)


def split(x: Tensor, seed: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Round flat float32 weights to 24 bits stochastically. Returns bfloat16 weights (n,) and int8 residuals (n,).

    seed, first: as in `stochastic_rounding.round_to_bfloat16`.
    """
    bits = x.contiguous().view(torch.int32)
    noise = (random_bits(first, x.numel(), seed, x.device) >> 24).to(torch.int32)
    magnitude = (((bits & MAGNITUDE) + noise) & -256).clamp(max=LARGEST)
    high = (magnitude + 0x8000) & -65536
    weight = (high | (bits & ~MAGNITUDE)).view(torch.float32)
    finite = x.isfinite()
    residual = torch.where(finite, (magnitude - high) >> 8, 0).to(torch.int8)
    return torch.where(finite, weight, x).bfloat16(), residual


def store_(
    p: Tensor, residual: Tensor | None, new: Tensor, skipped: Tensor, seed: int, first: int = 0
) -> None:
    """Write new weights in place, rounded stochastically to 24 bits with residuals, or to bfloat16 if p has this type.

    p, residual, new: of one shape. skipped: boolean scalar on the device; if it is True, nothing changes.
    """
    if residual is not None:
        high, low = split(new.float().flatten(), seed, first)
        new = high.view(new.shape)
        residual.copy_(torch.where(skipped, residual, low.view(new.shape)))
    elif p.dtype == torch.bfloat16:
        new = round_to_bfloat16(new.flatten(), seed, first).view(new.shape)
    p.copy_(torch.where(skipped, p, new.to(p.dtype)))
