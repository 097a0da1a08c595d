"""Rounding to E2M1 and E4M3 in float32 arithmetic, for Triton kernels.

Every value of these formats is a multiple of a step, which depends on its binade. Adding 2^23 steps to a float32 and
subtracting them again leaves the nearest multiple, ties to even, because a float32 of that size has no bits for
fractions of a step. So no conversion instruction is needed: the same code runs on every card, is exact in Triton's
interpreter, and avoids the double rounding of E4M3 conversion on compute capability 8.9. The addition must not be fused
with a preceding multiplication, so kernels that call these functions are launched with enable_fp_fusion=False.

Stochastic rounding is done in arithmetic too, because cards of compute capability 12.x lack the `cvt.rs` instruction.

Formats: OCP Microscaling Formats v1.0 (E2M1), Micikevicius et al. 2022, arXiv 2209.05433 (E4M3).
"""

import triton
import triton.language as tl


@triton.jit
def two_to_exponent(v, least: tl.constexpr, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return 2 ** (floor(log2(max(v, least))) + shift) for float32 v >= 0. least: a power of two."""
    bits = tl.maximum(v, least).to(tl.int32, bitcast=True) & 0x7F800000
    return (bits + (shift << 23)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_nearest(v):  # type: ignore[no-untyped-def]
    """Round v to the nearest E2M1 value, ties to even, as float32. v: float32 from 0 to 6. Steps: 0.5, 1 and 2."""
    steps_2_23 = two_to_exponent(v, 1.0, 22)
    return (v + steps_2_23) - steps_2_23


@triton.jit
def e2m1_stochastic(v, noise):  # type: ignore[no-untyped-def]
    """Round v to one of its two E2M1 neighbors, unbiased, as float32. v: 0 to 6; noise: uniform in [0, 1)."""
    return _stochastic(v, two_to_exponent(v, 1.0, -1), noise)


@triton.jit
def e4m3_nearest(v):  # type: ignore[no-untyped-def]
    """Round v to the nearest E4M3 value, ties to even, as float32. v: float32 from 0 to 448; smallest step 2^-9."""
    steps_2_23 = two_to_exponent(v, 0.015625, 20)
    return (v + steps_2_23) - steps_2_23


@triton.jit
def e4m3_up(v):  # type: ignore[no-untyped-def]
    """Round v up to the smallest E4M3 value that is at least v, as float32. v: float32 from 0 to 448."""
    nearest = e4m3_nearest(v)
    return tl.where(nearest < v, nearest + two_to_exponent(v, 0.015625, -3), nearest)


@triton.jit
def e4m3_stochastic(v, noise):  # type: ignore[no-untyped-def]
    """Round v to one of its two E4M3 neighbors, unbiased, as float32. v: 0 to 448; noise: uniform in [0, 1)."""
    return _stochastic(v, two_to_exponent(v, 0.015625, -3), noise)


@triton.jit
def _stochastic(v, step, noise):  # type: ignore[no-untyped-def]
    """Round v down or up to a multiple of `step`, a power of two, by comparing the remainder with the noise."""
    # The inverse of a power of two with exponent field e has the field 254 - e, so this product is exact.
    steps = v * (0x7F000000 - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    low = tl.floor(steps)
    return tl.where(noise < steps - low, low + 1.0, low) * step


@triton.jit
def e4m3_bits(v):  # type: ignore[no-untyped-def]
    """Return the E4M3 byte of v, a float32 that is an E4M3 value from 0 to 448, as uint8."""
    # Normal values: exponent bias 7 instead of 127, and 3 bits of mantissa instead of 23.
    normal = (v.to(tl.int32, bitcast=True) - (120 << 23)) >> 20
    return tl.where(v < 0.015625, (v * 512.0).to(tl.int32), normal).to(tl.uint8)


@triton.jit
def bf16_nearest(x):  # type: ignore[no-untyped-def]
    """Round a float32 to bfloat16, ties to even, as float32.

    NaN stays NaN or becomes infinity, but bits from 0x7FFF8000 (or 0xFFFF8000) upwards wrap to zero.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -65536).to(tl.float32, bitcast=True)
