"""Operands in FP8, MXFP8 and NVFP4 for torch's scaled matmuls.

Each quantizer takes a matrix (R, K) whose rows are contracted over K, and gives the codes, the scales in the layout
of the kernel, and what both together stand for in float64, so that a kernel can be judged without its rounding of
the operands. Plain torch, on any device; nothing here is fast.

Formats: OCP 8-bit floating point 1.0 (E4M3, E5M2) and Microscaling 1.0 (E8M0 scales of 32 values); NVFP4 as in NVIDIA
2025 (arXiv 2509.25149): E2M1 codes, an E4M3 scale for 16 values, a float32 scale for the tensor. The order of block
scales in memory is cuBLAS's for block-scaled products, which torch calls SWIZZLE_32_4_4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
MX_BLOCK, NV_BLOCK = 32, 16


@dataclass(frozen=True)
class ScaledOperand:
    """A quantized matrix (R, K). scales: as the kernel takes them; steps_RB: float32, one factor for K / B codes."""

    codes: Tensor
    scales: list[Tensor]
    steps_RB: Tensor

    def decoded(self) -> Tensor:
        """Return the dequantized values, (R, K) float64."""
        if self.codes.dtype == torch.float4_e2m1fn_x2:
            codes = unpack_e2m1(self.codes.view(torch.uint8))
        else:
            codes = self.codes.double()
        R, K = codes.shape
        B = self.steps_RB.shape[1]
        return (codes.view(R, B, K // B) * self.steps_RB.double()[:, :, None]).view(R, K)


@dataclass(frozen=True)
class Format:
    """quantize(x_RK, gradient) and multiply(a, b, gradient) = a b^T in bfloat16, on the device of the operands.

    gradient: whether the operand, or the product, belongs to the backward pass. tolerance: relative Frobenius error
    of a product of normal variables against float64, about twice what the format's rounding gives.
    """

    quantize: Callable[[Tensor, bool], ScaledOperand]
    multiply: Callable[[ScaledOperand, ScaledOperand, bool], Tensor]
    tolerance: float


def quantize_tensor(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """Quantize with one scale. Gradients are E5M2, which trades a bit of precision for range."""
    dtype = E5M2 if gradient else E4M3
    step = (x_RK.abs().amax() / torch.finfo(dtype).max).float()
    return ScaledOperand(_cast(x_RK / step, dtype), [step], step.expand(x_RK.shape[0], 1))


def quantize_rows(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """Quantize with one scale per row."""
    dtype = E5M2 if gradient else E4M3
    step_R1 = (x_RK.abs().amax(dim=1, keepdim=True) / torch.finfo(dtype).max).float()
    return ScaledOperand(_cast(x_RK / step_R1, dtype), [step_R1], step_R1)


def quantize_mx(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """A power of two for 32 values, the smallest that brings them into E4M3. Gradients too: the scale has the range."""
    R, K = x_RK.shape
    x_RBN = x_RK.float().view(R, K // MX_BLOCK, MX_BLOCK)
    mantissa, exponent = torch.frexp(x_RBN.abs().amax(dim=2) / torch.finfo(E4M3).max)
    exponent_RB = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    steps_RB = ((exponent_RB + 127).int() << 23).view(torch.float32)  # exact, as no power function need be
    codes = _cast(x_RBN / steps_RB[:, :, None], E4M3).view(R, K)
    scales = (exponent_RB + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return ScaledOperand(codes, [swizzle(scales)], steps_RB)


def quantize_nv(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """An E4M3 scale for 16 values of E2M1, and one float32 scale that brings the largest of them to 448."""
    R, K = x_RK.shape
    x_RBN = x_RK.float().view(R, K // NV_BLOCK, NV_BLOCK)
    amax_RB = x_RBN.abs().amax(dim=2)
    overall = amax_RB.amax() / (E2M1_MAX * torch.finfo(E4M3).max)
    scale_RB = _cast(amax_RB / (E2M1_MAX * overall), E4M3)
    steps_RB = scale_RB.float() * overall
    safe_RB = torch.where(steps_RB > 0, steps_RB, 1.0)
    codes_RK = encode_e2m1(torch.where(steps_RB[:, :, None] > 0, x_RBN / safe_RB[:, :, None], 0.0)).view(R, K)
    packed = (codes_RK[:, ::2] | (codes_RK[:, 1::2] << 4)).view(torch.float4_e2m1fn_x2)
    return ScaledOperand(packed, [swizzle(scale_RB), overall], steps_RB)


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 -> uint8 codes of E2M1: to nearest, ties to even, what is beyond 6 becomes 6; the sign is bit 3."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    # A tie goes to the even code: downwards in bucketize's own way, upwards where the limit is a hair lower.
    lower = torch.nextafter(middle, torch.zeros_like(middle))
    odd = torch.arange(len(middle), device=x.device) % 2 == 1
    codes = torch.bucketize(x.abs(), torch.where(odd, lower, middle), out_int32=True).to(torch.uint8)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """(R, K / 2) uint8, two codes each, the first in the low half -> (R, K) float64."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor(
        (*E2M1_VALUES, *(-v for v in E2M1_VALUES)), dtype=torch.float64, device=packed.device
    )
    return table[codes.long()]


def swizzle(scales_RB: Tensor) -> Tensor:
    """Arrange block scales for cuBLAS: tiles of 128 rows and 4 blocks, padded with zeros; flat and contiguous.

    In a tile, the scale of row r and block b is at (r % 32) * 16 + (r // 32) * 4 + b; tiles follow each other along K
    first.
    """
    R, B = scales_RB.shape
    padded = F.pad(scales_RB.view(torch.uint8), (0, -B % 4, 0, -R % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales_RB.dtype)


def multiply_tensor(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
    # Fast accumulation in the forward alone, as training with FP8 has it: gradients need the full sums.
    return torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scales[0],
        scale_b=b.scales[0],
        out_dtype=torch.bfloat16,
        use_fast_accum=not gradient,
    )


def multiply_rows(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
    return torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scales[0],
        scale_b=b.scales[0].t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=not gradient,
    )


def multiply_mx(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
    return _multiply_blocks(a, b, [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4])


def multiply_nv(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
    return _multiply_blocks(
        a,
        b,
        [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise],
        [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE],
    )


def _multiply_blocks(a: ScaledOperand, b: ScaledOperand, recipe: list[Any], order: list[Any]) -> Tensor:
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        a.scales,
        recipe,
        b.scales,
        recipe,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=torch.bfloat16,
    )


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


# Rounding one operand gives 2.7e-2 in E4M3, 5.3e-2 in E5M2 and 9.5e-2 in NVFP4, for normal variables.
FORMATS = {
    "fp8_tensor": Format(quantize_tensor, multiply_tensor, 0.12),
    "fp8_row": Format(quantize_rows, multiply_rows, 0.12),
    "mxfp8": Format(quantize_mx, multiply_mx, 0.08),
    "nvfp4": Format(quantize_nv, multiply_nv, 0.27),
}
