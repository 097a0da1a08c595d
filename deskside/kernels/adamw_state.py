"""State of AdamW: the names of its tensors, its hyperparameters, and the 8-bit format of its moments (`adamw_4bit.py`
has the 4-bit format).

The 8-bit format is Dettmers' block-wise dynamic map (arXiv 2110.02861, 1511.04561): 256 adjacent values share their
largest magnitude as a float32 scale, and each code is a value in [-1, 1] (first moment) or [0, 1] (second moment). The
codes cover seven decades. Each decade is cut into equal cells, twice as many as the decade below, so the relative
precision grows with the magnitude. Both moments together take 2 + 8 / 256 bytes per weight instead of 8.

Unlike in bitsandbytes, a small second moment gets the lowest nonzero code rather than that of zero, because the update
divides by its root.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

CPU = torch.device("cpu")
BLOCK = 256  # values that share a scale
DECADES = 7
SMALLEST_MAX = 2.0**-126  # a block whose largest value is below float32's normal range counts as zero
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
MASTER = "master"  # a float32 copy of a weight in bfloat16
RESIDUAL = "residual"  # the last 8 bits of a weight in 24 bits (`weights_24bit.py`)
EXP_AVG_MAX, EXP_AVG_SQ_MAX = "exp_avg_max", "exp_avg_sq_max"


@dataclass(frozen=True)
class AdamWHyperparameters:
    """Hyperparameters of AdamW (Loshchilov and Hutter, arXiv 1711.05101).

    cautious: decay only where the update moves the weight towards zero (arXiv 2510.12402).
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    cautious: bool = False


def bits_of(exp_avg: Tensor, elements: int) -> int:
    """Return the bits per value of a moment of `elements` values: 4 or 8 for codes, else those of its dtype."""
    if exp_avg.dtype == torch.uint8:
        return 8 if exp_avg.numel() == elements else 4
    return 8 * exp_avg.itemsize


def num_blocks(elements: int) -> int:
    """Return the number of blocks that `elements` values take."""
    return -(-elements // BLOCK)


def zero_code(signed: bool) -> int:
    """Return the code that represents the value 0."""
    return 127 if signed else 0


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the nearest codes (n,) uint8, and the largest magnitude of each block (blocks,) float32."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(dim=1)
    scaled = padded * torch.where(largest >= SMALLEST_MAX, 1 / largest, 0.0)[:, None]
    values = dynamic_map(signed, x.device)
    codes = torch.bucketize(scaled.flatten()[: x.numel()], (values[1:] + values[:-1]) / 2)
    if not signed:
        codes = torch.where((codes == 0) & (x > 0), 1, codes)
    return codes.to(torch.uint8), largest


def dequantize(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """Return the float32 values (n,) of codes (n,), given the largest magnitude of each block (blocks,)."""
    values = dynamic_map(signed, codes.device)[codes.int()]
    return values * largest.repeat_interleave(BLOCK)[: codes.numel()]


@cache
def dynamic_map(signed: bool, device: torch.device = CPU) -> Tensor:
    """Return the values of the 256 codes, float32, ascending: zero, one, and the midpoint of every cell.

    Decade i, from 10^(i-7) to 10^(i-6), has 2^i cells for each sign, or 2^(i+1) where there is no sign.
    """
    positive = []
    for i in range(DECADES):
        cells = 2 ** (i if signed else i + 1)
        midpoints = 0.1 + 0.9 * (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        positive.append(midpoints * 10.0 ** (i - DECADES + 1))
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    values = torch.cat([*positive, *((-p for p in positive) if signed else ()), ends])
    return values.sort().values.float().to(device)
