"""Counter-based random numbers: a function of (stream, count, purpose, token), equal on every device.

A stream belongs to one sample of one request and is derived from its seed. A row therefore draws the same numbers
whatever else is in its batch, and no generator state has to be stored or passed through a CUDA graph. The function is
the finalizer of SplitMix64 (`utils/splitmix.py`) over counters.
"""

import torch
from torch import Tensor

from deskside.utils.errors import UsageError
from deskside.utils.splitmix import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2, finalize

DRAW, PROPOSE, ACCEPT = 1, 2, 3  # purposes: independent numbers for the same place


def stream_of(seed: int, sample: int = 0) -> int:
    """The stream of a request's sample, as a signed 64-bit number. Raises UsageError for a negative seed."""
    if seed < 0:
        raise UsageError(f"seed: {seed} must be 0 or more")
    state = 0
    while True:  # 64 bits of the seed at a time
        state = finalize(state + (seed & MASK) + GOLDEN & MASK)
        seed >>= 64
        if not seed:
            return _signed(finalize(state + (sample + 1) * GOLDEN & MASK))


def exponentials(stream_B: Tensor, count_B: Tensor, purpose: int, token_BW: Tensor) -> Tensor:
    """(B, W) float32, exponentially distributed with mean 1, one for each token.

    From 32 bits, so that the smallest, which decide a race, are fine: 2^-33 and up.
    """
    if token_BW.is_cuda:
        from deskside.kernels.decode_triton import exponentials as kernel

        return kernel(stream_B, count_B, purpose, token_BW)
    bits_BW = _mix(_base(stream_B, count_B, purpose)[:, None] + (token_BW + 1) * _signed(GOLDEN))
    u_BW = (_shift(bits_BW, 32).float() + 0.5) * 2.0**-32
    return -torch.log1p(-u_BW.clamp(max=1 - 2.0**-24))


def uniforms(stream_B: Tensor, count_B: Tensor, purpose: int) -> Tensor:
    """(B,) float64 in [0, 1), of 53 bits."""
    return _shift(_base(stream_B, count_B, purpose), 11).double() * 2.0**-53


def _base(stream_B: Tensor, count_B: Tensor, purpose: int) -> Tensor:
    return _mix(_mix(stream_B + _signed(purpose * GOLDEN & MASK)) + count_B * _signed(GOLDEN))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(MULTIPLIER_1)
    x = (x ^ _shift(x, 27)) * _signed(MULTIPLIER_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, as if there were no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
