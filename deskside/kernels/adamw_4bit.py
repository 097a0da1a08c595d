"""The 4-bit format of AdamW's moments (Li et al. 2023, arXiv 2309.01507), two codes in a byte.

128 adjacent values share their largest magnitude as a float32 scale. Both moments together take 1 + 8 / 128 bytes per
weight.

- First moment: the dynamic map of `adamw_state.py` with three decades: 0, 1, and with either sign 0.0055, 0.0325,
  0.0775, 0.2125, 0.4375, 0.6625 and 0.8875.
- Second moment: the sixteenths 1/16, 2/16, ..., 1. Zero is left out, because the update divides by the root: an element
  that is small within its block gets a shorter step instead of a huge one.

Both are rounded to nearest, as in the paper. On a regression with 600 steps, stochastic rounding of the second moment
changed the loss by less than another seed did, and that of the first moment made it 1 % worse. The codes of elements
2 i and 2 i + 1 are the low and the high half of byte i.
"""

from functools import cache

import torch
from torch import Tensor

from deskside.kernels.adamw_state import CPU, SMALLEST_MAX

BLOCK = 128  # values that share a scale
LEVELS = 16
MAGNITUDES = (0.0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0)  # of the first moment
ZERO = 7  # the first moment's code for 0


def zero_byte(signed: bool) -> int:
    """Return the initial byte of the codes: two codes of 0 for a first moment (signed).

    For a second moment, which has no code of 0, it has no effect, because the initial scales are 0.
    """
    return ZERO | ZERO << 4 if signed else 0


def num_blocks(elements: int) -> int:
    """Return the number of blocks that `elements` values take."""
    return -(-elements // BLOCK)


def num_bytes(elements: int) -> int:
    """Return the number of bytes that the codes of `elements` values take."""
    return -(-elements // 2)


def quantize_first(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of a first moment, (bytes,) uint8, and the scales (blocks,) float32."""
    scaled, largest = _scaled(m)
    values = first_map(m.device)
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2)
    return _packed(codes, m.numel()), largest


def quantize_second(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of a second moment, and the scales, as `quantize_first` does."""
    scaled, largest = _scaled(v)
    codes = (scaled * LEVELS + 0.5).floor().clamp(1, LEVELS) - 1
    return _packed(codes, v.numel()), largest


def dequantize_first(codes: Tensor, largest: Tensor, n: int) -> Tensor:
    """Return the float32 values (n,) of a first moment."""
    return first_map(codes.device)[_unpacked(codes, n)] * largest.repeat_interleave(BLOCK)[:n]


def dequantize_second(codes: Tensor, largest: Tensor, n: int) -> Tensor:
    """Return the float32 values (n,) of a second moment."""
    return (_unpacked(codes, n).float() + 1) / LEVELS * largest.repeat_interleave(BLOCK)[:n]


@cache
def first_map(device: torch.device = CPU) -> Tensor:
    """Return the values of the first moment's 16 codes, float32, ascending."""
    values = [*(-x for x in MAGNITUDES[-2:0:-1]), *MAGNITUDES]
    return torch.tensor(values, dtype=torch.float64).float().to(device)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values divided by their block's largest magnitude, padded to whole blocks, and these magnitudes."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(dim=1)
    return (padded * torch.where(largest >= SMALLEST_MAX, 1 / largest, 0.0)[:, None]).flatten(), largest


def _packed(codes: Tensor, n: int) -> Tensor:
    low, high = codes.to(torch.uint8).view(-1, 2).unbind(1)
    return (low | high << 4)[: num_bytes(n)]


def _unpacked(packed: Tensor, n: int) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), 1).flatten()[:n].int()
