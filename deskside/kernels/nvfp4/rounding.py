"""Rounding to E2M1 and E4M3 in float32 arithmetic, and the random numbers of stochastic rounding, for Triton kernels.

Every value of these formats is a multiple of a step that its binade sets. Adding 2^23 steps to a float32 and taking
them away again leaves the nearest multiple, ties to even, because float32 then has no bits left for more. So no
conversion instruction is needed: one code serves every card, is exact in Triton's interpreter, and is free of the
double rounding that E4M3 conversion has on compute capability 8.9. The additions must not be fused with a
multiplication before them: kernels that call these are launched with enable_fp_fusion=False.

Stochastic rounding is by a hash of (seed, element), not by the `cvt.rs` instruction, which cards of compute
capability 12.x lack. Philox would cost more instructions than the whole rest of the quantiser.

Formats: OCP Microscaling Formats v1.0 (E2M1), Micikevicius et al. 2022, arXiv 2209.05433 (E4M3).
"""

import triton
import triton.language as tl


@triton.jit
def two_to_exponent(v, least: tl.constexpr, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    """2 ** (floor(log2(max(v, least))) + shift) of a non-negative float32. least: a power of two."""
    bits = tl.maximum(v, least).to(tl.int32, bitcast=True) & 0x7F800000
    return (bits + (shift << 23)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_nearest(v):  # type: ignore[no-untyped-def]
    """The E2M1 value nearest to v, ties to even, as float32. v: float32 from 0 to 6. Steps: 0.5, 1 and 2."""
    many = two_to_exponent(v, 1.0, 22)
    return (v + many) - many


@triton.jit
def e2m1_stochastic(v, noise):  # type: ignore[no-untyped-def]
    """One of the two E2M1 neighbours of v, as float32, whose mean is v. v: 0 to 6; noise: uniform in [0, 1)."""
    return _stochastic(v, two_to_exponent(v, 1.0, -1), noise)


@triton.jit
def e4m3_nearest(v):  # type: ignore[no-untyped-def]
    """The E4M3 value nearest to v, ties to even, as float32. v: float32 from 0 to 448; smallest step 2^-9."""
    many = two_to_exponent(v, 0.015625, 20)
    return (v + many) - many


@triton.jit
def e4m3_up(v):  # type: ignore[no-untyped-def]
    """The smallest E4M3 value that is not below v, as float32. v: float32 from 0 to 448."""
    near = e4m3_nearest(v)
    return tl.where(near < v, near + two_to_exponent(v, 0.015625, -3), near)


@triton.jit
def e4m3_stochastic(v, noise):  # type: ignore[no-untyped-def]
    """One of the two E4M3 neighbours of v, as float32, whose mean is v. v: 0 to 448; noise: uniform in [0, 1)."""
    return _stochastic(v, two_to_exponent(v, 0.015625, -3), noise)


@triton.jit
def _stochastic(v, step, noise):  # type: ignore[no-untyped-def]
    # The inverse of a power of two has the exponent 254 - e. Everything but the comparison is exact.
    steps = v * (0x7F000000 - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    low = tl.floor(steps)
    return tl.where(noise < steps - low, low + 1.0, low) * step


@triton.jit
def e4m3_bits(v):  # type: ignore[no-untyped-def]
    """The byte of a float32 that is an E4M3 value from 0 to 448, as uint8."""
    normal = (
        v.to(tl.int32, bitcast=True) - (120 << 23)
    ) >> 20  # exponent bias 7 instead of 127, 3 bits of mantissa
    return tl.where(v < 0.015625, (v * 512.0).to(tl.int32), normal).to(tl.uint8)


@triton.jit
def bf16_nearest(x):  # type: ignore[no-untyped-def]
    """A float32 rounded to bfloat16, ties to even, still as float32. NaN may become infinity, nothing finite."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def uniform(element, seed):  # type: ignore[no-untyped-def]
    """Float32 uniform in [0, 1), multiples of 2^-23: a function of the element's number and a 64-bit seed alone.

    Two multiply-and-shift rounds (constants: Wellons, "hash prospector", 2018) with one word of the seed before the
    first and another between them, so that two seeds give unrelated sequences and not one sequence reordered.
    """
    low = seed.to(tl.int64).to(tl.uint32)
    high = (seed.to(tl.int64) >> 32).to(tl.uint32)
    between = high + _mixed(low ^ 0x9E3779B9, high)  # different also for seeds below 2^32
    h = _mixed(element.to(tl.uint32) ^ low, between)
    return ((h >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _mixed(h, between):  # type: ignore[no-untyped-def]
    h ^= h >> 16
    h *= 0x7FEB352D
    h = (h ^ (h >> 15)) + between
    h *= 0x846CA68B
    return h ^ (h >> 16)
