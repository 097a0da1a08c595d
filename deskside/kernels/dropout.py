"""Dropout whose mask is a function of seed, stream, step, token and channel, so that nothing has to be stored.

The random bits are those of Philox 4x32-10, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"): a keyed mixing function of a counter. So a backward, a recomputed forward and a resumed run compute
the mask again, and it depends neither on the number of GPUs nor on the size of a pass, if tokens are counted over the
whole optimizer step.

One Philox call makes 128 bits and costs about a hundred integer instructions, so eight channels share it, with 16 bits
each. They are an eighth of a row apart, so that threads next to each other read values next to each other. A channel is
dropped if its 16 bits are below `threshold(rate)`, so a rate is a multiple of 2^-16.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32

CHANNELS_PER_CALL = 8
RATES = 2**16
MASK = 0xFFFFFFFF
MULTIPLIERS, KEY_STEPS, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10


def dropout(x: Tensor, position: Tensor, rate: float) -> Tensor:
    """Return x / (1 - rate), where a random share `rate` of the values is 0 instead. x: (..., channels).

    position: int64 (4,) on x's device: seed, stream, step, and the number of x's first token in the step. The other
    tokens follow in order. Autograd and torch.compile treat this as one operator. rate: rounded to a multiple of 2^-16.
    """
    out: Tensor = _dropout(x, position, threshold(rate))
    return out


def threshold(rate: float) -> int:
    """Return how many of the 2^16 values of a channel's random bits drop it."""
    return round(rate * RATES)


def scale(dropped: int) -> float:
    """Return the factor of the values that are kept; the expected value of the output is then the input."""
    return RATES / (RATES - dropped)


@torch.library.custom_op("deskside::dropout", mutates_args=())
def _dropout(x: Tensor, position: Tensor, dropped: int) -> Tensor:
    if x.is_cuda:
        from deskside.kernels.dropout_triton import dropout as kernel

        return kernel(x.contiguous(), position, dropped)
    keep = kept(position, x.numel() // x.shape[-1], x.shape[-1], dropped).view_as(x)
    scaled = (x.to(at_least_float32(x)) * scale(dropped)).to(x.dtype)
    return torch.where(keep, scaled, torch.zeros_like(scaled))


@_dropout.register_fake
def _(x: Tensor, position: Tensor, dropped: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, position, ctx.dropped = inputs
    ctx.save_for_backward(position)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _dropout(grad, ctx.saved_tensors[0], ctx.dropped), None, None


_dropout.register_autograd(_backward, setup_context=_setup_context)


def kept(position: Tensor, tokens: int, channels: int, dropped: int) -> Tensor:
    """Return the mask (tokens, channels) of `dropout`, True where values are kept, in plain torch."""
    seed, stream, step, first = position.unbind()
    calls = -(-channels // CHANNELS_PER_CALL)
    token = first + torch.arange(tokens, device=position.device)[:, None]
    call = torch.arange(calls, device=position.device)
    words = philox((call, token & MASK, stream & MASK, step & MASK), (seed & MASK, seed >> 32 & MASK))
    bits = torch.cat([word & 0xFFFF for word in words] + [word >> 16 for word in words], dim=1)
    return bits[:, :channels] >= dropped


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four words of Philox 4x32-10. All words are below 2^32 in int64, and broadcast."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2^64, so all 64 bits of the unsigned product are there.
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (second >> 32 & MASK) ^ b ^ low, second & MASK
        c, d = (first >> 32 & MASK) ^ d ^ high, first & MASK
        low, high = (low + KEY_STEPS[0]) & MASK, (high + KEY_STEPS[1]) & MASK
    return a, b, c, d
