"""Rotary position embedding: the table of cosines and sines. `kernels.functional.rotate` applies it.

Channels c and c + C/2 are a pair that turns by theta^(-2c/C) per position. A model that knows rows of some original
length L meets angles in longer rows that it has not seen: those of pairs that do not complete a turn within L. The
scalings (RopeScaling) therefore slow these pairs down, and leave pairs with many turns as they are:

- linear: every frequency is divided by `factor` (position interpolation, Chen et al. 2023, arXiv 2306.15595).
- llama3 (Llama 3.1): pairs with fewer than `low_freq_factor` turns within L are divided by `factor`, those with more
  than `high_freq_factor` turns are kept, and in between the two are mixed, linearly in the number of turns.
- yarn (Peng et al. 2023, arXiv 2309.00071): the same idea, but mixed linearly in the number of the pair.
- longrope (Ding et al. 2024, arXiv 2402.13753): one divisor per pair, which a search has found.

Longer rows spread attention over more tokens. In yarn and longrope, cosines and sines, and with them queries and keys,
are therefore multiplied by the attention factor, which sharpens attention.
"""

import math

import torch
from torch import Tensor

from deskside.config.rope import RopeScaling


def rope_table(
    positions: int,
    rotary_dim: int,
    theta: float,
    device: torch.device,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (positions, rotary_dim / 2) float32 each. On the meta device they are empty tensors."""
    if device.type == "meta":
        # Arithmetic on meta tensors imports torch._dynamo, which takes more than a second.
        shapes = torch.empty(2, positions, rotary_dim // 2, dtype=torch.float32, device=device)
        return shapes[0], shapes[1]
    periods = _periods(rotary_dim, theta, device)
    frequencies = (
        1.0 / periods if scaling is None else _scaled_frequencies(periods, theta, scaling, positions)
    )
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    if scaling is None:
        return angles.cos(), angles.sin()
    return angles.cos() * scaling.attention_scale, angles.sin() * scaling.attention_scale


def frequency_divisors(rotary_dim: int, theta: float, scaling: RopeScaling, positions: int) -> Tensor:
    """Return the divisor of each frequency, (rotary_dim / 2,), for a scaling and number of positions."""
    periods = _periods(rotary_dim, theta, torch.device("cpu"))
    return 1.0 / periods / _scaled_frequencies(periods, theta, scaling, positions)


def _periods(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return the positions per radian of each pair of channels."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return theta**exponents


def _scaled_frequencies(periods: Tensor, theta: float, scaling: RopeScaling, positions: int) -> Tensor:
    """Return the scaled frequencies of a model with this number of positions. The rounding is that of transformers."""
    frequencies = 1.0 / periods
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    length = scaling.original_max_position_embeddings
    assert length is not None
    if scaling.rope_type == "longrope":
        divisors = scaling.long_factor if positions > length else scaling.short_factor
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device=periods.device) * periods)
    if scaling.rope_type == "llama3":
        turns = length / (2 * math.pi / frequencies)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / scaling.factor + kept * frequencies
    kept = _yarn_kept(2 * len(periods), theta, scaling, length).to(periods.device)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + frequencies * kept


def _yarn_kept(rotary_dim: int, theta: float, scaling: RopeScaling, length: int) -> Tensor:
    """Return for each pair of channels the weight of its own frequency: 1 keeps it, 0 divides it by the factor."""

    def pair_with(turns: float) -> float:
        """Return the (fractional) number of the pair that makes this many turns within the original length."""
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)
