"""Counter-based random numbers: a function of (stream, count, purpose, token), equal on all devices up to rounding.

Each sample of a request has its own stream, a 64-bit number derived from the seed; `count` is the number of tokens
generated so far. A row therefore draws the same numbers whatever else is in its batch, and no generator state has to
be stored or passed through a CUDA graph. The function applies the finalizer of SplitMix64 (`utils/splitmix.py`).
"""

import torch
from torch import Tensor

from deskside.utils.errors import UsageError
from deskside.utils.splitmix import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2, finalize

DRAW, PROPOSE, ACCEPT = 1, 2, 3  # purposes, which get independent numbers at the same stream and count


def stream_of(seed: int, sample: int = 0) -> int:
    """Return the random stream of one sample, a signed 64-bit number. Raises UsageError for a negative seed."""
    if seed < 0:
        raise UsageError(f"seed: must be 0 or more, not {seed}")
    state = 0
    while True:  # mixes in 64 bits of the seed at a time
        state = finalize(state + (seed & MASK) + GOLDEN & MASK)
        seed >>= 64
        if not seed:
            return _signed(finalize(state + (sample + 1) * GOLDEN & MASK))


def exponentials(stream_B: Tensor, count_B: Tensor, purpose: int, token_BW: Tensor) -> Tensor:
    """Return exponential random numbers with mean 1, one for each token: (B, W) float32.

    They are made from 32 bits, so the smallest is 2^-33. `gumbel_argmax` depends on the resolution near zero.
    """
    if token_BW.is_cuda:
        from deskside.kernels.decode_triton import exponentials as kernel

        return kernel(stream_B, count_B, purpose, token_BW)
    bits_BW = _mix(_base(stream_B, count_B, purpose)[:, None] + (token_BW + 1) * _signed(GOLDEN))
    u_BW = (_shift(bits_BW, 32).float() + 0.5) * 2.0**-32
    return -torch.log1p(-u_BW.clamp(max=1 - 2.0**-24))


def uniforms(stream_B: Tensor, count_B: Tensor, purpose: int) -> Tensor:
    """Return uniform random numbers in [0, 1) with 53 bits: (B,) float64."""
    return _shift(_base(stream_B, count_B, purpose), 11).double() * 2.0**-53


def _base(stream_B: Tensor, count_B: Tensor, purpose: int) -> Tensor:
    return _mix(_mix(stream_B + _signed(purpose * GOLDEN & MASK)) + count_B * _signed(GOLDEN))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(MULTIPLIER_1)
    x = (x ^ _shift(x, 27)) * _signed(MULTIPLIER_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch has no unsigned 64-bit arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """Reinterpret an unsigned 64-bit number as signed."""
    return x - (1 << 64) if x >> 63 else x
