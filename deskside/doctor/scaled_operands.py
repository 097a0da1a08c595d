"""Operands in FP8, MXFP8 and NVFP4 for torch's scaled matmuls.

Each quantizer takes a matrix (R, K) that the matmul contracts over K. It returns the codes, the scales in the layout of
the kernel, and the factors that dequantize the codes, so that a kernel's error can be measured without the rounding of
its operands. Everything is plain, slow torch and runs on any device.

Formats: OCP 8-bit floating point 1.0 (E4M3, E5M2) and Microscaling 1.0 (E8M0 scales of 32 values); NVFP4 as in NVIDIA
2025 (arXiv 2509.25149): E2M1 codes, an E4M3 scale for 16 values, a float32 scale for the tensor. The order of block
scales in memory is cuBLAS's for block-scaled products, which torch calls SWIZZLE_32_4_4.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.precision.formats import (
    E2M1_LARGEST,
    FP8,
    LARGEST,
    e2m1_decode,
    e2m1_encode,
    e2m1_nearest,
    pack,
    to_fp8,
    unpack,
)

MX_BLOCK, NV_BLOCK = 32, 16


@dataclass(frozen=True)
class ScaledOperand:
    """A quantized matrix (R, K). scales: in the kernel's layout; steps_RB: float32 factor per block of K / B codes."""

    codes: Tensor
    scales: list[Tensor]
    steps_RB: Tensor

    def dequantize(self) -> Tensor:
        """Return the dequantized values, (R, K) float64."""
        if self.codes.dtype == torch.float4_e2m1fn_x2:
            codes = e2m1_decode(unpack(self.codes.view(torch.uint8))).double()
        else:
            codes = self.codes.double()
        R, K = codes.shape
        B = self.steps_RB.shape[1]
        return (codes.view(R, B, K // B) * self.steps_RB.double()[:, :, None]).view(R, K)


@dataclass(frozen=True)
class Format:
    """A format: quantize(x_RK, gradient), and multiply(a, b, gradient) = a b^T in bfloat16 on the operands' device.

    gradient: True for an operand, or a product, of the backward pass. tolerance: allowed relative Frobenius error,
    against float64, of a product of normally distributed matrices: about twice the error of rounding the operands.
    """

    quantize: Callable[[Tensor, bool], ScaledOperand]
    multiply: Callable[[ScaledOperand, ScaledOperand, bool], Tensor]
    tolerance: float


def quantize_tensor(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """Quantize with one scale for the tensor. Gradients use E5M2, which trades a bit of precision for range."""
    format: FP8 = "e5m2" if gradient else "e4m3"
    step = (x_RK.abs().amax() / LARGEST[format]).float()
    return ScaledOperand(to_fp8(x_RK / step, format), [step], step.expand(x_RK.shape[0], 1))


def quantize_rows(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """Quantize with one scale per row."""
    format: FP8 = "e5m2" if gradient else "e4m3"
    step_R1 = (x_RK.abs().amax(dim=1, keepdim=True) / LARGEST[format]).float()
    return ScaledOperand(to_fp8(x_RK / step_R1, format), [step_R1], step_R1)


def quantize_mx(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """Quantize with the smallest power of two per 32 values that brings them into E4M3, gradients included."""
    R, K = x_RK.shape
    x_RBN = x_RK.float().view(R, K // MX_BLOCK, MX_BLOCK)
    mantissa, exponent = torch.frexp(x_RBN.abs().amax(dim=2) / LARGEST["e4m3"])
    exponent_RB = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    # Bits of 2 ** exponent; torch.exp2 may not be exact.
    steps_RB = ((exponent_RB + 127).int() << 23).view(torch.float32)
    codes = to_fp8(x_RBN / steps_RB[:, :, None], "e4m3").view(R, K)
    scales = (exponent_RB + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return ScaledOperand(codes, [swizzle(scales)], steps_RB)


def quantize_nv(x_RK: Tensor, gradient: bool) -> ScaledOperand:
    """Quantize to E2M1 with an E4M3 scale per 16 values; a float32 scale makes the largest of the E4M3 scales 448."""
    R, K = x_RK.shape
    x_RBN = x_RK.float().view(R, K // NV_BLOCK, NV_BLOCK)
    amax_RB = x_RBN.abs().amax(dim=2)
    overall = amax_RB.amax() / (E2M1_LARGEST * LARGEST["e4m3"])
    scale_RB = to_fp8(amax_RB / (E2M1_LARGEST * overall), "e4m3")
    steps_RB = scale_RB.float() * overall
    safe_RB = torch.where(steps_RB > 0, steps_RB, 1.0)
    scaled_RBN = torch.where(steps_RB[:, :, None] > 0, x_RBN / safe_RB[:, :, None], 0.0)
    packed = pack(e2m1_encode(e2m1_nearest(scaled_RBN)).view(R, K))
    return ScaledOperand(packed.view(torch.float4_e2m1fn_x2), [swizzle(scale_RB), overall], steps_RB)


def swizzle(scales_RB: Tensor) -> Tensor:
    """Arrange block scales for cuBLAS: tiles of 128 rows and 4 blocks, padded with zeros; flat and contiguous.

    In a tile, the scale of row r and block b is at (r % 32) * 16 + (r // 32) * 4 + b. Tiles follow each other along K,
    then along the rows.
    """
    R, B = scales_RB.shape
    padded = F.pad(scales_RB.view(torch.uint8), (0, -B % 4, 0, -R % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales_RB.dtype)


def multiply_fp8(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
    """Multiply operands with one scale per tensor or per row; as in FP8 training, only the forward accumulates fast."""
    return torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scales[0],
        scale_b=b.scales[0].t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=not gradient,
    )


def multiply_blocks(a: ScaledOperand, b: ScaledOperand, gradient: bool) -> Tensor:
    """Multiply MXFP8 operands, or NVFP4 ones, which also have a scale for the whole tensor."""
    recipe, swizzles = [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4]
    if len(a.scales) > 1:
        recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        a.scales,
        recipe,
        b.scales,
        recipe,
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        output_dtype=torch.bfloat16,
    )


# Rounding one normally distributed operand has a relative error of 2.7e-2 in E4M3, 5.3e-2 in E5M2 and 9.5e-2 in NVFP4.
FORMATS = {
    "fp8_tensor": Format(quantize_tensor, multiply_fp8, 0.12),
    "fp8_row": Format(quantize_rows, multiply_fp8, 0.12),
    "mxfp8": Format(quantize_mx, multiply_blocks, 0.08),
    "nvfp4": Format(quantize_nv, multiply_blocks, 0.27),
}
