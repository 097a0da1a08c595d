"""The kernels' random numbers in torch, so that stochastic rounding can be compared value by value."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def uniform(shape: tuple[int, int], seed: int) -> Tensor:
    """What kernels/nvfp4/rounding.py gives to each element of a contiguous matrix: float32 in [0, 1)."""
    low, high = seed & WORD, (seed >> 32) & WORD
    between = (high + int(_mixed(torch.tensor(low ^ 0x9E3779B9), high))) & WORD
    h = _mixed(torch.arange(shape[0] * shape[1], dtype=torch.int64) ^ low, between)
    return ((h >> 9).double() / 2**23).float().view(shape)


def _mixed(h: Tensor, between: int) -> Tensor:
    h = h ^ (h >> 16)
    h = _times(h, 0x7FEB352D)
    h = ((h ^ (h >> 15)) + between) & WORD
    h = _times(h, 0x846CA68B)
    return h ^ (h >> 16)


def _times(h: Tensor, factor: int) -> Tensor:
    """The low 32 bits of a product, in two parts that fit 64 bits."""
    return (h * (factor & 0xFFFF) + ((h * (factor >> 16) & 0xFFFF) << 16)) & WORD
