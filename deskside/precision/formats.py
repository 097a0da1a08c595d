"""The small floating-point formats, exactly: FP8 (E4M3, E5M2) and FP4 (E2M1).

Plain torch operations, the same numbers on a CPU and on a card, and nothing that waits for the device. Casts to FP8
clamp first: beyond the largest value torch up to 2.11 gives NaN and later ones saturate, and training wants the latter.
NaN stays NaN in FP8; E2M1 has none, so NaN has to be carried by a block's scale.

Formats: Micikevicius et al. 2022 (arXiv 2209.05433) for FP8, OCP Microscaling 1.0 for E2M1.
"""

from typing import Literal

import torch
from torch import Tensor

FP8 = Literal["e4m3", "e5m2"]
DTYPE: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST: dict[FP8, float] = {"e4m3": 448.0, "e5m2": 57344.0}
E2M1_LARGEST = 6.0


def to_fp8(x: Tensor, format: FP8) -> Tensor:
    """float32, float16 or bfloat16 -> FP8, to nearest with ties to even; what is too large becomes the largest."""
    largest = LARGEST[format]
    return x.clamp(-largest, largest).to(DTYPE[format])


def e4m3_up(x: Tensor) -> Tensor:
    """float32 in [0, 448] -> the smallest E4M3 value that is not below it; what is larger becomes 448."""
    nearest = to_fp8(x, "e4m3")
    # The codes of values >= 0 are in the order of the values. Nothing is above the code of 448, for x was clamped.
    return _e4m3_at(_codes(nearest) + (nearest.float() < x.clamp(max=LARGEST["e4m3"])).to(torch.uint8))


def e4m3_stochastic(x: Tensor, noise: Tensor) -> Tensor:
    """float32 >= 0 -> one of its two neighbours in E4M3, so that the mean is x. noise: uniform in [0, 1), like x."""
    x = x.clamp(max=LARGEST["e4m3"])
    nearest = to_fp8(x, "e4m3")
    below = _codes(nearest) - (nearest.float() > x).to(torch.uint8)
    low, high = _e4m3_at(below).float(), _e4m3_at(below + 1).float()
    # The difference of neighbours is a power of two, so this is exact. Above 448 there is NaN, which is never smaller.
    return _e4m3_at(below + (noise < (x - low) / (high - low)))


def _codes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _e4m3_at(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def e2m1_nearest(x: Tensor) -> Tensor:
    """float32 -> the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with x's sign, in float32; ties to the even code.

    Beyond 6 becomes 6. The sign of a negative zero is kept.
    """
    magnitude, step = _e2m1_step(x)
    return torch.copysign(torch.round(magnitude / step) * step, x)


def e2m1_stochastic(x: Tensor, noise: Tensor) -> Tensor:
    """float32 -> one of its two neighbours in E2M1, so that the mean is x within +-6. noise: uniform in [0, 1)."""
    magnitude, step = _e2m1_step(x)
    steps = magnitude / step
    low = steps.floor()
    # Compared with the exact remainder: `floor(steps + noise)` would move a value of the grid by rounding the sum.
    return torch.copysign((low + (noise < steps - low)) * step, x)


def _e2m1_step(x: Tensor) -> tuple[Tensor, Tensor]:
    """The clamped magnitude, and the distance of E2M1's values around it (a power of two: divisions are exact)."""
    magnitude = x.abs().clamp(max=E2M1_LARGEST)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return magnitude, step


def e2m1_encode(values: Tensor) -> Tensor:
    """Values of E2M1 (as floats) -> their codes, uint8: three bits of magnitude, and bit 3 for the sign."""
    magnitude = values.abs()
    code = torch.where(magnitude <= 2.0, magnitude * 2, torch.where(magnitude <= 4.0, magnitude + 2, 7.0))
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Codes 0 to 15 -> float32 values of E2M1."""
    code = (codes & 7).float()
    magnitude = torch.where(code <= 4, code / 2, torch.where(code <= 6, code - 2, E2M1_LARGEST))
    return torch.where(codes >= 8, -magnitude, magnitude)


def pack(codes: Tensor) -> Tensor:
    """(..., K) codes -> (..., K / 2) bytes, the even position in the low half, as block-scaled products read them."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """(..., K / 2) bytes -> (..., K) codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
