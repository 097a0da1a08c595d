"""Loading and storing of weights in the kernels of optimizers, in every format; `weights_24bit.py` is the reference."""

import triton
import triton.language as tl

from deskside.kernels import weights_24bit
from deskside.kernels.random_triton import random_bits, rounded_to

LARGEST = tl.constexpr(weights_24bit.LARGEST)
MAGNITUDE = tl.constexpr(weights_24bit.MAGNITUDE)


@triton.jit
def load_weight(p_ptr, residual_ptr, offsets, mask):  # type: ignore[no-untyped-def]
    """Return weights in float32. residual_ptr: None if they have no residuals."""
    p = tl.load(p_ptr + offsets, mask, 0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offsets, mask, 0).to(tl.int32)
        p = (p.to(tl.int32, bitcast=True) + (residual << 8)).to(tl.float32, bitcast=True)
    return p


@triton.jit
def store_weight(p_ptr, residual_ptr, x, offsets, mask, element, seed):  # type: ignore[no-untyped-def]
    """Store float32 weights, rounded stochastically to 24 bits or to bfloat16. element, seed: of the random bits."""
    if residual_ptr is None:
        tl.store(p_ptr + offsets, rounded_to(x, element, seed, p_ptr.dtype.element_ty), mask)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = (bits & MAGNITUDE) + (random_bits(element, seed) >> 24).to(tl.int32)
        magnitude = tl.minimum(magnitude & -256, LARGEST)
        high = (magnitude + 0x8000) & -65536
        finite = tl.abs(x) < float("inf")
        residual = tl.where(finite, (magnitude - high) >> 8, 0)
        p = tl.where(finite, (high | (bits & ~MAGNITUDE)).to(tl.float32, bitcast=True), x)
        tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask)
        tl.store(residual_ptr + offsets, residual.to(tl.int8), mask)
