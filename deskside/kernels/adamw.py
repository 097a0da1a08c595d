"""AdamW whose two moments are kept in float32, in bfloat16 or in 8 bits: one update of one tensor.

8 bits are Dettmers' block-wise dynamic map (arXiv 2110.02861, 1511.04561): 256 neighbours share their largest
magnitude as a float32 scale, and a code stands for a value in [-1, 1] (first moment) or [0, 1] (second). The codes
cover seven decades; each decade is cut evenly, into twice as many cells as the decade below. Two bytes and 8/256 per
weight in place of eight.

Here stand the map, the formats' plain reference in torch, and the choice: Triton on CUDA, the reference elsewhere.
One rule is ours: a second moment that is not zero is never rounded to zero, because it stands under a division.

Why own code: bitsandbytes' kernel takes the step's number from the host and cannot leave a bad step out without
waiting for the device; torchao's AdamW8bit is compiled for seconds at the first step, and its state is no plain tensor.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
DECADES = 7
SMALLEST_MAX = 2.0**-126  # a block whose largest value is below float32's normal range counts as zero
FIRST, SECOND = "exp_avg", "exp_avg_sq"
FIRST_MAX, SECOND_MAX = "exp_avg_max", "exp_avg_sq_max"


@dataclass(frozen=True)
class Rule:
    """The numbers of an AdamW update (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def adamw_update(
    p: Tensor,
    g: Tensor,
    state: dict[str, Tensor],
    step: Tensor,
    skip: Tensor,
    rule: Rule,
    fused: bool,
    factor: Tensor | None = None,
) -> None:
    """Updates the flat weights `p` and their moments in place.

    p, g: (n,), contiguous. state: FIRST and SECOND (n,), in the parameter's dtype or bfloat16; or uint8 codes with
    FIRST_MAX and SECOND_MAX (blocks of 256,) float32. step: float32 scalar on the device, this update counted. skip:
    float32 scalar on the device; where it is 1 nothing changes. fused: run the Triton kernel. factor: what the gradient
    is multiplied with first, a float32 scalar on the device; None is 1.
    """
    if fused:
        from deskside.kernels.adamw_triton import launch

        launch(p, g, state, step, skip, rule, factor)
        torch.autograd.graph.increment_version(p)  # whoever keeps the weight in another form goes by it
        return
    if state[FIRST].dtype != torch.uint8:
        m, v = state[FIRST].to(p.dtype), state[SECOND].to(p.dtype)
    else:
        m = dequantize(state[FIRST], state[FIRST_MAX], signed=True)
        v = dequantize(state[SECOND], state[SECOND_MAX], signed=False)
    g = g.to(m.dtype) if factor is None else g.to(m.dtype) * factor
    m = torch.lerp(m, g, 1 - rule.betas[0])
    v = torch.lerp(v, g * g, 1 - rule.betas[1])
    b1, b2 = (1 - torch.pow(beta, step.double()) for beta in rule.betas)
    update = (m / b1) / ((v / b2).sqrt() + rule.eps)
    keep = skip > 0
    p.copy_(torch.where(keep, p, p * (1 - rule.lr * rule.weight_decay) - rule.lr * update))
    new = {FIRST: m, SECOND: v}
    if state[FIRST].dtype == torch.uint8:
        new[FIRST], new[FIRST_MAX] = quantize(m, signed=True)
        new[SECOND], new[SECOND_MAX] = quantize(v, signed=False)
    for key, value in new.items():
        state[key].copy_(torch.where(keep, state[key], value.to(state[key].dtype)))


def blocks(elements: int) -> int:
    """Scales of so many values."""
    return -(-elements // BLOCK)


def zero_code(signed: bool) -> int:
    """The code of zero."""
    return 127 if signed else 0


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(n,) -> codes (n,) uint8, the nearest in the map, and the blocks' largest magnitudes (blocks,) float32."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    largest = padded.abs().amax(dim=1)
    scaled = padded * torch.where(largest >= SMALLEST_MAX, 1 / largest, 0.0)[:, None]
    values = dynamic_map(signed).to(x.device)
    codes = torch.bucketize(scaled.flatten()[: x.numel()], (values[1:] + values[:-1]) / 2)
    if not signed:
        codes = torch.where((codes == 0) & (x > 0), 1, codes)
    return codes.to(torch.uint8), largest


def dequantize(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """The float32 values (n,) of codes (n,) and their blocks' largest magnitudes (blocks,)."""
    values = dynamic_map(signed).to(codes.device)[codes.int()]
    return values * largest.repeat_interleave(BLOCK)[: codes.numel()]


@cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values, ascending, float32 on the CPU: zero, one, and the middles of every decade's cells.

    Decade i, from 10^(i-7) to 10^(i-6), has 2^i cells for each sign, or 2^(i+1) where there is no sign.
    """
    positive = []
    for i in range(DECADES):
        cells = 2 ** (i if signed else i + 1)
        middles = 0.1 + 0.9 * (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
        positive.append(middles * 10.0 ** (i - DECADES + 1))
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    values = torch.cat([*positive, *((-p for p in positive) if signed else ()), ends])
    return values.sort().values.float()
