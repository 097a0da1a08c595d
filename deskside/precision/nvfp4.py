"""NVFP4, exactly, in plain torch: the numbers that every faster path has to give.

A value is code x block scale x global scale: the code is E2M1 (4 bits), the block scale E4M3, one for 16 values along
the summed dimension of the product, and the global scale one float32 for the tensor. Code x block scale has six
significant bits and always fits bfloat16. So a product of NVFP4 operands is, on any card, a bfloat16 product of the
two `emulated` operands whose float32 result is multiplied by both global scales: no error but the order of sums.

The variants differ in a few places only, all named by `config.recipes.Operand`:
  scaling         16x16: one scale for a tile, so that a matrix and its transpose are the same numbers.
  hadamard        rotates the values before anything else.
  scale_up        block scales rounded up: no value is clipped, which makes stochastic rounding unbiased.
  four_over_six   each block's largest value is mapped to 6 or to 4, whichever has the smaller squared error.
  eden            MS-EDEN: values to nearest, then the scales of 128 values are corrected by <x, x> / <x, q>, which
                  undoes the shrinking of rounding under a random rotation, and rounded stochastically.

The random Hadamard transform: each group of 16 or 128 values along the summed dimension is multiplied by diag(signs)
H / sqrt(size), H the Sylvester Hadamard matrix. That is a rotation: applied to both operands it cancels in their
product, and it spreads an outlier over its group, so that a block scale is not spent on one value. Size 16 with one
fixed vector of signs is NVIDIA's (2509.25149); size 128 with signs drawn anew makes MS-EDEN unbiased (2601.22813).

The order of operations is that of NVIDIA's reference (transformer-engine 2.20), to the bit; divisions are correctly
rounded ones, also on a card (a Python number as divisor would become a multiplication there). A tensor that holds NaN
or infinity gives NaN or infinity back, through its scales, so that a finite check finds it.

Sources: NVIDIA 2025 (arXiv 2509.25149); four over six, Cook et al. 2025 (2512.02010); MS-EDEN, Panferov et al. 2026
(2601.22813), with the correction taken over true values, block scales included, as EDEN's proof has it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.precision.formats import (
    LARGEST,
    e2m1_decode,
    e2m1_encode,
    e2m1_nearest,
    e2m1_stochastic,
    e4m3_stochastic,
    e4m3_up,
    to_fp8,
)
from deskside.utils.errors import UsageError

Along = Literal["columns", "rows"]

BLOCK = 16
EDEN_GROUP = 128
# A block's largest value is mapped to 6 / 1.054: 17/16 because the block scale may round down by that much, 0.93
# because a little clipping costs less than the coarser steps that avoid it (MS-EDEN's paper).
EDEN_OVERRIDE = 17 / 16 * 0.93
FLOAT_MAX = torch.finfo(torch.float32).max
_NVIDIA_NEGATIVE = 0xD7E8  # bit i: is sign i of transformer-engine's fixed vector of 16 negative?


@dataclass(frozen=True)
class Quantized:
    """An (N, K) operand. Laid out as the tensor it came from, whichever dimension the blocks run along.

    codes: (N, K) uint8, E2M1. block_scale: E4M3, (N, K / 16) or, along rows, (N / 16, K); the scale of a
    16x16 tile is repeated 16 times. global_scale: float32, one number. After a Hadamard transform these are the rotated
    values.
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor
    along: Along

    @property
    def emulated(self) -> Tensor:
        """(N, K) bfloat16: code x block scale, exact. The global scale belongs into the product's epilogue."""
        scale = self.block_scale.float()
        spread = _blocks(e2m1_decode(self.codes), self.along) * scale.view(
            -1, 1, _stride(self.codes, self.along)
        )
        return spread.bfloat16().view(self.codes.shape)

    def dequantized(self) -> Tensor:
        """(N, K) float32."""
        return self.emulated.float() * self.global_scale


def multiple(operand: Operand) -> int:
    """Return the divisor that the summed dimension needs; 16 for FP8 too, which _scaled_mm requires."""
    return max(BLOCK, operand.hadamard, EDEN_GROUP if operand.rounding == "eden" else 0)


def check_divisible(name: str, shape: tuple[int, int], operand: Operand, along: Along) -> None:
    """Raises UsageError, naming `name`, if an (N, K) matrix of this shape cannot be this operand.

    along: the dimension that the product sums over, "columns" (K) or "rows" (N). Formats that need nothing pass.
    """
    if not operand.quantized:
        return
    N, K = shape
    summed = ("columns", K) if along == "columns" else ("rows", N)
    other = ("rows", N) if along == "columns" else ("columns", K)
    wanted = [(*summed, multiple(operand))] + ([(*other, BLOCK)] if operand.scaling == "16x16" else [])
    for dimension, size, divisor in wanted:
        if size % divisor or size == 0:
            near = [str(n) for n in (size // divisor * divisor, -(-size // divisor) * divisor) if n]
            raise UsageError(
                f"{name} is {N} x {K}, and {operand.format} needs its {dimension} ({size}) divisible by {divisor}; "
                f"use {' or '.join(dict.fromkeys(near)) or divisor}, or keep it in bf16"
            )


def check_operand(operand: Operand) -> None:
    """Raise UsageError for undefined combinations of options."""
    if operand.format != "nvfp4" or operand.scaling not in ("1x16", "16x16"):
        raise UsageError(
            f"{operand.format} scaled by '{operand.scaling}' is not an NVFP4 operand; NVFP4 is scaled 1x16 or 16x16"
        )
    if operand.rounding == "eden" and (operand.hadamard != EDEN_GROUP or operand.scaling != "1x16"):
        raise UsageError(
            f"rounding 'eden' needs hadamard {EDEN_GROUP} and scaling 1x16: it is unbiased by that rotation alone"
        )
    if operand.four_over_six and (operand.rounding != "nearest" or operand.scale_up):
        raise UsageError(
            "four_over_six goes with rounding 'nearest' and without scale_up; it sets the scale itself"
        )
    if operand.scale_up and operand.rounding == "eden":
        raise UsageError("scale_up does not go with rounding 'eden', which rounds the scales stochastically")


def quantize(
    x_NK: Tensor,
    operand: Operand,
    along: Along,
    *,
    amax: Tensor | None = None,
    signs: Tensor | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Quantized:
    """Quantise a float32 or bfloat16 matrix whose product sums over its "columns" (K) or its "rows" (N).

    amax: float32, the largest magnitude of the tensor (after the transform), where it is known already.
    signs: (operand.hadamard,) of +-1; left out, 16 uses NVIDIA's fixed vector, and 128 has none.
    noise: uniform in [0, 1), of x's shape for rounding "stochastic" and of block_scale's for "eden"; left out, it is
        drawn with `generator`.
    Raises UsageError for shapes and operands that NVFP4 does not have.
    """
    check_operand(operand)
    check_divisible("the operand", (x_NK.shape[0], x_NK.shape[1]), operand, along)
    if operand.hadamard:
        x_NK = hadamard(x_NK, _signs(operand, signs, x_NK.device), along)
    x_NK = x_NK.contiguous()
    # A rounding tie of four over six is broken by the order of a sum, so a tile has one order for both directions.
    direction: Along = "columns" if operand.scaling == "16x16" else along
    block_amax = _blocks(x_NK, direction).abs().amax(dim=1, keepdim=True).float()
    if operand.scaling == "16x16":
        block_amax = _over_tiles(block_amax, x_NK, _largest)
    scales = _Scales.of(block_amax.amax() if amax is None else amax.float(), operand)
    x_GBR = _blocks(x_NK.float(), direction)
    if operand.four_over_six:
        values, block_scale = _four_over_six(x_GBR, block_amax, scales, operand, x_NK)
    else:
        ideal = (block_amax * scales.block_encode).clamp(max=FLOAT_MAX)
        block_scale = e4m3_up(ideal) if operand.scale_up else to_fp8(ideal, "e4m3")
        scaled = _scaled(x_GBR, block_scale, scales)
        if operand.rounding == "stochastic":
            drawn = _noise(noise, x_NK.shape, x_NK.device, generator)
            values = e2m1_stochastic(scaled, _blocks(drawn, direction))
        else:
            values = e2m1_nearest(scaled)
        if operand.rounding == "eden":
            drawn = _noise(noise, _scale_shape(x_NK, along), x_NK.device, generator)
            corrected = _eden_corrected(x_GBR, values, block_scale, scales, along)
            block_scale = e4m3_stochastic(corrected, drawn.view(corrected.shape))
    return Quantized(
        e2m1_encode(values).view(x_NK.shape),
        _laid_out(block_scale, x_NK, direction, along),
        scales.global_scale,
        along,
    )


@dataclass(frozen=True)
class _Scales:
    """Global scales that follow from the amax of the tensor; float32 scalars.

    encode: x encode is at most 6 x the largest block scale. decode: 1 / encode. block_encode: block maximum ->
    ideal block scale. global_scale: decode, but not finite if the tensor was not.
    """

    amax: Tensor
    encode: Tensor
    decode: Tensor
    block_encode: Tensor
    global_scale: Tensor

    @staticmethod
    def of(amax: Tensor, operand: Operand) -> "_Scales":
        range_ = _top(operand) * _largest_scale(operand)
        encode = (_like(amax, range_) / amax).clamp(max=FLOAT_MAX)
        encode = torch.where(encode == 0, 1.0, encode)  # amax is infinite
        # Below 8e-36 the encoding scale stops at the largest float32, and the decoding one has to stop with it.
        global_scale = torch.maximum(amax / _like(amax, range_), _like(amax, 1 / FLOAT_MAX))
        return _Scales(amax, encode, encode.reciprocal(), encode * (1 / _top(operand)), global_scale)


def _top(operand: Operand) -> float:
    """Return the code value that a block's largest value is mapped to."""
    return 6.0 / EDEN_OVERRIDE if operand.rounding == "eden" else 6.0


def _largest_scale(operand: Operand) -> float:
    """448, or 256 where a scale may still grow: by 1.5 in four over six, by the correction in EDEN."""
    return 256.0 if operand.four_over_six or operand.rounding == "eden" else LARGEST["e4m3"]


def _scaled(x_GBR: Tensor, block_scale: Tensor, scales: _Scales) -> Tensor:
    """x / (block scale x global scale), within +-6. A block of scale 0 decodes to zeros whatever its codes."""
    encode = (block_scale.float() * scales.decode).reciprocal().clamp(max=FLOAT_MAX)
    return (x_GBR * encode).clamp(-6.0, 6.0) + 0.0  # a negative zero becomes zero, as in the reference


def _four_over_six(
    x_GBR: Tensor, block_amax: Tensor, scales: _Scales, operand: Operand, x_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """Both candidates, and of each block (or tile) the one of the smaller squared error; a tie keeps 6."""
    base = block_amax / _like(block_amax, 6.0) * scales.encode
    candidates = []
    for stretch in (1.0, 1.5):
        block_scale = to_fp8(base * stretch, "e4m3")
        values = e2m1_nearest(_scaled(x_GBR, block_scale, scales))
        decoded = values * block_scale.float() * scales.amax / _like(x_GBR, 6.0 * _largest_scale(operand))
        squares = (decoded - x_GBR).square()
        # One by one: the order of a float32 sum decides near-ties, and the reference adds in this one.
        error = torch.zeros_like(block_amax)
        for position in range(BLOCK):
            error = error + squares[:, position : position + 1]
        if operand.scaling == "16x16":
            error = _over_tiles(error, x_NK, _sum_in_halves)
        candidates.append((values, block_scale.float(), error))
    (values6, scale6, error6), (values4, scale4, error4) = candidates
    four = error4 < error6
    return torch.where(four, values4, values6), torch.where(four, scale4, scale6).to(torch.float8_e4m3fn)


def _eden_corrected(
    x_GBR: Tensor, values: Tensor, block_scale: Tensor, scales: _Scales, along: Along
) -> Tensor:
    """Block scales times <x, x> / <x, q> of their group of 128 values, float32; x scaled so that squares are safe."""
    R, blocks = x_GBR.shape[2], EDEN_GROUP // BLOCK
    x = (x_GBR * scales.encode).view(-1, blocks, BLOCK, R)
    decoded = (values * block_scale.float()).view(x.shape)
    square, product = x.square().sum((1, 2), keepdim=True), (x * decoded).sum((1, 2), keepdim=True)
    factor = torch.where(product > 0, square / product, 1.0)
    return (block_scale.float().view(-1, blocks, 1, R) * factor).view(block_scale.shape)


def _stride(x_NK: Tensor, along: Along) -> int:
    """Return the memory stride between the values of a block."""
    return 1 if along == "columns" else x_NK.shape[1]


def _blocks(x_NK: Tensor, along: Along) -> Tensor:
    """(N, K) -> (G, 16, R), a view: blocks are along the middle dimension in both directions."""
    return x_NK.view(-1, BLOCK, _stride(x_NK, along))


def _scale_shape(x_NK: Tensor, along: Along) -> torch.Size:
    N, K = x_NK.shape
    return torch.Size((N, K // BLOCK) if along == "columns" else (N // BLOCK, K))


def _over_tiles(per_block: Tensor, x_NK: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """(N K / 16, 1, 1) of blocks along columns -> the same shape, reduced over the 16 rows of each tile."""
    N, K = x_NK.shape
    tiles = reduce(per_block.view(N // BLOCK, BLOCK, K // BLOCK))
    return tiles.expand(-1, BLOCK, -1).reshape(per_block.shape)


def _largest(x_TBC: Tensor) -> Tensor:
    return x_TBC.amax(dim=1, keepdim=True)


def _sum_in_halves(x_TBC: Tensor) -> Tensor:
    """Sum over the middle, each time the first half plus the second: the order of a warp's reduction."""
    while x_TBC.shape[1] > 1:
        first, second = x_TBC.chunk(2, dim=1)
        x_TBC = first + second
    return x_TBC


def _laid_out(block_scale: Tensor, x_NK: Tensor, direction: Along, along: Along) -> Tensor:
    if direction == along:
        return block_scale.view(_scale_shape(x_NK, along))
    per_tile = block_scale.view(_scale_shape(x_NK, direction))[::BLOCK]
    return per_tile.view(torch.uint8).repeat_interleave(BLOCK, dim=1).view(torch.float8_e4m3fn)


def _signs(operand: Operand, signs: Tensor | None, device: torch.device) -> Tensor:
    if signs is None:
        if operand.hadamard != 16 or operand.fresh_signs:
            raise UsageError(f"a Hadamard transform of {operand.hadamard} needs its vector of signs")
        return nvidia_signs(device)
    if signs.shape != (operand.hadamard,):
        raise UsageError(f"a Hadamard transform of {operand.hadamard} was given {len(signs)} signs")
    return signs


def _noise(
    noise: Tensor | None, shape: torch.Size, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    if noise is None:
        return torch.rand(shape, device=device, generator=generator)
    if noise.shape != shape:
        raise UsageError(f"noise must be {tuple(shape)}, but is {tuple(noise.shape)}")
    return noise


def _like(x: Tensor, value: float) -> Tensor:
    """A float32 number on x's device: a tensor, so that a division by it is a division."""
    return torch.full((), value, dtype=torch.float32, device=x.device)


def nvidia_signs(device: torch.device) -> Tensor:
    """(16,) float32 +-1, the same in every layer and step. Made by arithmetic: no copy from the host."""
    negative = (_NVIDIA_NEGATIVE >> torch.arange(16, device=device)) & 1
    return (1 - 2 * negative).float()


def draw_signs(size: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """(size,) float32, each +1 or -1."""
    return torch.randint(0, 2, (size,), device=device, generator=generator).float() * 2 - 1


def hadamard(x_NK: Tensor, signs_S: Tensor, along: Along) -> Tensor:
    """Transform groups of S = len(signs) values, a power of two, within rows ("columns") or down the rows ("rows").

    Size 16 gives x's dtype, as NVIDIA's kernels round the transformed values to bfloat16; a larger one float32. Sums
    are float32. S must divide that dimension: `check_divisible` says so to a person.
    """
    (N, K), S = x_NK.shape, len(signs_S)
    R = 1 if along == "columns" else K  # in memory S values of a group are R apart
    # Scaled before the sums, which overflow otherwise from 2e37 on. A power of two changes no bit of them.
    first = 0.5 ** math.ceil(math.log2(S) / 2)
    x_GSR = x_NK.float().reshape(-1, S, R) * (signs_S.float() * first).view(S, 1)
    half = 1
    while half < S:
        pair = x_GSR.view(-1, S // (2 * half), 2, half, R)
        a, b = pair.unbind(2)
        x_GSR = torch.stack((a + b, a - b), dim=2).view(-1, S, R)
        half *= 2
    result = (x_GSR * (S**-0.5 / first)).view(N, K)
    return result.to(x_NK.dtype) if S == 16 else result
