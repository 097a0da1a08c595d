"""Random numbers and stochastic rounding to bfloat16 for Triton kernels; `stochastic_rounding.py` is the reference.

The random numbers are a hash of (seed, element): Philox would cost more instructions than most kernels that use them.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def random_bits(element, seed):  # type: ignore[no-untyped-def]
    """Return 32 random bits as uint32, as a function of the element's index and a 64-bit seed.

    Two multiply-and-shift rounds (constants: Wellons, "hash prospector", 2018), with one word of the seed mixed in
    before the first and another between them, so that the sequence of one seed is not a permutation of another's.
    """
    low = seed.to(tl.int64).to(tl.uint32)
    high = (seed.to(tl.int64) >> 32).to(tl.uint32)
    between = high + _mixed(low ^ 0x9E3779B9, high)  # different also for seeds below 2^32
    return _mixed(element.to(tl.uint32) ^ low, between)


@triton.jit
def uniform(element, seed):  # type: ignore[no-untyped-def]
    """Return float32 uniform in [0, 1), multiples of 2^-23; arguments as in `random_bits`."""
    return ((random_bits(element, seed) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _mixed(h, between):  # type: ignore[no-untyped-def]
    h ^= h >> 16
    h *= 0x7FEB352D
    h = (h ^ (h >> 15)) + between
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def rounded_to(x, element, seed, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert float32 to TYPE: stochastically to bfloat16, and as usual to any other type."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True) + (random_bits(element, seed) >> 16).to(tl.int32)
        rounded = (bits & -65536).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < float("inf"), rounded, x)
    return x.to(TYPE)


@triton.jit(do_not_specialize=["seed", "first"])
def _add_rounded(TOTAL, ADDEND, seed, first, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = offsets < n
    total = tl.load(TOTAL + offsets, mask, 0.0).to(tl.float32)
    total += tl.load(ADDEND + offsets, mask, 0.0).to(tl.float32)
    tl.store(TOTAL + offsets, rounded_to(total, first + offsets, seed, TOTAL.dtype.element_ty), mask)


def add_rounded_(total: Tensor, addend: Tensor, seed: int, first: int = 0) -> None:
    """See `stochastic_rounding.add_rounded_`. Both contiguous."""
    n = total.numel()
    _add_rounded[(triton.cdiv(n, BLOCK),)](total, addend, seed, first, n, BLOCK, num_warps=4)
