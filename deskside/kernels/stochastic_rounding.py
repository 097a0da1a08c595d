"""Stochastic rounding to bfloat16 in plain torch, bit for bit as in the Triton kernels (`random_triton.py`).

A weight in bfloat16 has 8 significant bits, so rounding to nearest would drop every update of less than 1/512 of the
weight, which most updates of a run are. Stochastic rounding takes one of the two neighbors, the nearer one with the
higher probability. The expected value is then exact, and small updates add up (Zamirai et al. 2020, arXiv 2010.06192).

The random bits are a hash of an element's index and a seed. So a resumed run repeats them, replicas round alike, and
the result does not depend on how a tensor is cut into pieces.
"""

import zlib

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def rounding_seed(name: str, step: int, seed: int = 0) -> int:
    """Return a 63-bit seed for one tensor in one step, as a function of the tensor's name and the run's seed."""
    return (zlib.crc32(name.encode(), seed & MASK) >> 1) << 32 | (step & MASK)


def random_bits(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Return the 32 random bits of the elements from `first` on, (count,) int64."""
    low, high = seed & MASK, seed >> 32 & MASK
    element = torch.arange(first, first + count, dtype=torch.int64, device=device)
    between = (high + _mixed(torch.tensor(low ^ 0x9E3779B9, device=device), high)) & MASK
    return _mixed((element & MASK) ^ low, between)


def _mixed(h: Tensor, between: Tensor | int) -> Tensor:
    # int64 products wrap modulo 2^64, which leaves their low 32 bits exact.
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & MASK
    h = ((h ^ (h >> 15)) + between) & MASK
    h = (h * 0x846CA68B) & MASK
    return h ^ (h >> 16)


def round_to_bfloat16(x: Tensor, seed: int, first: int = 0) -> Tensor:
    """Round a flat tensor to bfloat16 stochastically; first: index of its first element. inf and NaN are unchanged."""
    bits = x.float().contiguous().view(torch.int32)
    noise = (random_bits(first, x.numel(), seed, x.device) >> 16).to(torch.int32)
    rounded = ((bits + noise.view_as(bits)) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def add_rounded_(total: Tensor, addend: Tensor, seed: int, first: int = 0) -> None:
    """Add to a contiguous bfloat16 tensor in place. The sum is computed in float32 and rounded stochastically.

    first: index of the first element, for a part of a larger tensor.
    """
    if total.is_cuda:
        from deskside.kernels.random_triton import add_rounded_ as kernel

        kernel(total, addend, seed, first)
        return
    total.copy_(round_to_bfloat16((total.float() + addend.float()).flatten(), seed, first).view_as(total))
