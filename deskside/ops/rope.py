"""Rotary position embedding: the table of cosines and sines, also for YaRN. `kernels.functional.rotate` applies it.

YaRN (Peng et al. 2023, arXiv 2309.00071) lets a model that knows rows of some original length read longer ones. A pair
of channels that makes many turns within the original length keeps its frequency. A pair that does not complete one turn
would meet angles that it has not seen, so its frequency is divided by `factor`. Pairs in between are
interpolated. Longer rows spread attention over more tokens, so cosines and sines, and with them queries and keys, are
multiplied by the attention factor, which sharpens attention.
"""

import math

import torch
from torch import Tensor

from deskside.config.model import YarnConfig


def rope_table(
    positions: int, head_dim: int, theta: float, device: torch.device, yarn: YarnConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (positions, head_dim / 2) float32 each. On the meta device they are empty tensors."""
    if device.type == "meta":
        # Arithmetic on meta tensors imports torch._dynamo, which takes more than a second.
        shapes = torch.empty(2, positions, head_dim // 2, dtype=torch.float32, device=device)
        return shapes[0], shapes[1]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if yarn is not None:
        kept = _kept_share(head_dim, theta, yarn).to(device)
        frequencies = 1.0 / (yarn.factor * theta**exponents) * (1 - kept) + frequencies * kept
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    if yarn is None:
        return angles.cos(), angles.sin()
    return angles.cos() * yarn.attention_scale, angles.sin() * yarn.attention_scale


def _kept_share(head_dim: int, theta: float, yarn: YarnConfig) -> Tensor:
    """Return for each pair of channels the weight of its own frequency: 1 keeps it, 0 divides it by the factor."""

    def pair_with(turns: float) -> float:
        """Return the (fractional) number of the pair that makes this many turns within the original length."""
        length = yarn.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)
