"""The rules of NVFP4 operands: valid combinations of options, shapes and Hadamard signs. Needs no Triton.

The reference (precision/nvfp4.py) and the Triton quantizer (quantize.py) share them.
"""

from typing import Literal

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.utils.errors import UsageError

Along = Literal["columns", "rows"]  # the dimension of an (N, K) matrix that the product sums over: K or N

BLOCK = 16  # values that share a block scale
EDEN_GROUP = 128  # values whose block scales MS-EDEN corrects together; also its Hadamard size
# MS-EDEN maps a block's largest value to 6 / EDEN_OVERRIDE = 6.07 instead of 6. 17/16, because the block scale may be
# rounded down by that factor; 0.93, because a little clipping costs less than the coarser steps that avoid it.
EDEN_OVERRIDE = 17 / 16 * 0.93
_NVIDIA_NEGATIVE = 0xD7E8  # bit i is 1 where sign i of transformer-engine's fixed vector of 16 is negative


def nvidia_signs(device: torch.device) -> Tensor:
    """Return transformer-engine's fixed signs, (16,) float32 of +-1. Computed on the device: nothing is copied."""
    negative = (_NVIDIA_NEGATIVE >> torch.arange(16, device=device)) & 1
    return (1 - 2 * negative).float()


def required_multiple(operand: Operand) -> int:
    """Return the number that must divide the summed dimension: at least 16, which _scaled_mm requires for FP8 too."""
    return max(BLOCK, operand.hadamard, EDEN_GROUP if operand.rounding == "eden" else 0)


def check_operand(operand: Operand) -> None:
    """Raise UsageError unless these options are a defined NVFP4 operand."""
    if operand.format != "nvfp4" or operand.scaling not in ("1x16", "16x16"):
        raise UsageError(
            f"{operand.format} scaled by '{operand.scaling}' is not an NVFP4 operand; NVFP4 is scaled 1x16 or 16x16"
        )
    if operand.rounding == "eden" and (operand.hadamard != EDEN_GROUP or operand.scaling != "1x16"):
        raise UsageError(
            f"rounding 'eden' needs hadamard {EDEN_GROUP} and scaling 1x16; without them it is not unbiased"
        )
    if operand.four_over_six and (operand.rounding != "nearest" or operand.scale_up):
        raise UsageError(
            "four_over_six goes with rounding 'nearest' and without scale_up, because it sets the scale itself"
        )
    if operand.scale_up and operand.rounding == "eden":
        raise UsageError("scale_up does not go with rounding 'eden', which rounds the scales stochastically")


def check_divisible(name: str, shape: tuple[int, int], operand: Operand, along: Along) -> None:
    """Raise UsageError, naming `name`, unless an (N, K) matrix of this shape can be this operand.

    Accepts operands of every format; unquantized ones may have any shape.
    """
    if not operand.quantized:
        return
    N, K = shape
    summed = ("columns", K) if along == "columns" else ("rows", N)
    other = ("rows", N) if along == "columns" else ("columns", K)
    required = [(*summed, required_multiple(operand))]
    if operand.scaling == "16x16":
        required.append((*other, BLOCK))
    for dimension, size, divisor in required:
        if size % divisor or size == 0:
            below, above = size // divisor * divisor, -(-size // divisor) * divisor
            suggested = dict.fromkeys(str(n) for n in (below, above) if n)
            raise UsageError(
                f"{name} is {N} x {K}, and {operand.format} needs its {dimension} ({size}) divisible by {divisor}; "
                f"use {' or '.join(suggested) or divisor}, or keep it in bf16"
            )


def check_signs(operand: Operand, signs: Tensor | None, device: torch.device) -> None:
    """Raise UsageError unless `signs` is what the operand's Hadamard transform needs.

    Only a transform of size 16 without fresh signs needs none; it has NVIDIA's fixed vector.
    """
    size = operand.hadamard
    if signs is None:
        if size and (size != 16 or operand.fresh_signs):
            raise UsageError(f"a Hadamard transform of {size} needs its vector of signs")
    elif signs.shape != (size,) or signs.device != device:
        raise UsageError(
            f"a Hadamard transform of {size} was given {len(signs)} signs on {signs.device}; "
            f"it needs {size} on {device}"
        )
