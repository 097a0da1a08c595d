"""Exact conversion to the small floating-point formats FP8 (E4M3, E5M2) and FP4 (E2M1).

These are plain torch operations that give the same numbers on a CPU and on a GPU and never wait for the device. Casts
to FP8 clamp first, because training needs saturation, and torch turns too large values into infinity in E5M2 and, up to
2.11, into NaN in E4M3. NaN stays NaN in FP8. E2M1 has no NaN, so the block scale must carry it.

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
    """Round float32, float16 or bfloat16 to the nearest FP8 value, ties to even; values that are too large saturate."""
    largest = LARGEST[format]
    return x.clamp(-largest, largest).to(DTYPE[format])


def e4m3_up(x: Tensor) -> Tensor:
    """Round float32 >= 0 up to the next E4M3 value. Values above 448 become 448."""
    nearest = to_fp8(x, "e4m3")
    # For values >= 0, the next code is the next larger value. 448 has the last code, and x was clamped to it.
    return _e4m3_at(_codes(nearest) + (nearest.float() < x.clamp(max=LARGEST["e4m3"])).to(torch.uint8))


def e4m3_stochastic(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 >= 0 to one of its two neighbors in E4M3, so that the mean is x (if x <= 448).

    noise: uniform in [0, 1), of x's shape.
    """
    x = x.clamp(max=LARGEST["e4m3"])
    nearest = to_fp8(x, "e4m3")
    below = _codes(nearest) - (nearest.float() > x).to(torch.uint8)
    low, high = _e4m3_at(below).float(), _e4m3_at(below + 1).float()
    # The difference of neighbors is a power of two, so the division is exact. For x = 448, `high` is NaN and the
    # comparison is False.
    return _e4m3_at(below + (noise < (x - low) / (high - low)))


def _codes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _e4m3_at(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def e2m1_nearest(x: Tensor) -> Tensor:
    """Round float32 to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with x's sign, in float32; ties to the even code.

    Magnitudes above 6 become 6. A negative zero keeps its sign.
    """
    magnitude, step = _e2m1_step(x)
    return torch.copysign(torch.round(magnitude / step) * step, x)


def e2m1_stochastic(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to one of its two neighbors in E2M1, so that the mean is x (within +-6). The result is float32.

    noise: uniform in [0, 1), of x's shape.
    """
    magnitude, step = _e2m1_step(x)
    steps = magnitude / step
    low = steps.floor()
    # Not `floor(steps + noise)`: rounding of the sum could change values that are E2M1 values already.
    return torch.copysign((low + (noise < steps - low)) * step, x)


def _e2m1_step(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clamped magnitude and the distance between the E2M1 values around it, a power of two."""
    magnitude = x.abs().clamp(max=E2M1_LARGEST)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return magnitude, step


def e2m1_encode(values: Tensor) -> Tensor:
    """Convert E2M1 values (as floats) to their codes, uint8: bits 0 to 2 are the magnitude, bit 3 is the sign."""
    magnitude = values.abs()
    code = torch.where(magnitude <= 2.0, magnitude * 2, torch.where(magnitude <= 4.0, magnitude + 2, 7.0))
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Convert E2M1 codes (0 to 15) to float32 values."""
    code = (codes & 7).float()
    magnitude = torch.where(code <= 4, code / 2, torch.where(code <= 6, code - 2, E2M1_LARGEST))
    return torch.where(codes >= 8, -magnitude, magnitude)


def pack(codes: Tensor) -> Tensor:
    """Pack codes (..., K) into bytes (..., K / 2) with even positions in bits 0 to 3, as block-scaled products need."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes (..., K / 2) into codes (..., K)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
