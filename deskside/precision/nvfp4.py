"""Reference implementation of NVFP4 quantization in plain torch. Every faster path must give the same numbers.

A value is stored as code x block scale x global scale. The code is E2M1 (4 bits). The block scale is E4M3 and shared by
16 values along the summed dimension of the product. The global scale is one float32 per tensor. Code x block scale has
up to six significant bits and always fits bfloat16. A product of NVFP4 operands can therefore run on any GPU as a
bfloat16 product of the two `emulated` operands, whose float32 result is multiplied by both global scales. Only the
order of sums differs from a native product.

The variants are selected by the options of `config.recipes.Operand`:
  scaling         16x16: one scale per tile, so that a matrix and its transpose are quantized to the same numbers.
  hadamard        The values are rotated first.
  scale_up        Block scales are rounded up. No value is clipped, which makes stochastic rounding unbiased.
  four_over_six   Each block's largest value is mapped to 6 or to 4, whichever has the smaller squared error.
  rounding        nearest; stochastic, with one random number per value; or eden: MS-EDEN, where values x are rounded
                  to the nearest q. Rounding under a random rotation shrinks them, so the scales of each group of 128
                  values are multiplied by <x, x> / <x, q> and rounded stochastically.

The random Hadamard transform multiplies each group of 16 or 128 values along the summed dimension by diag(signs) H /
sqrt(size), where H is the Sylvester Hadamard matrix. This is a rotation, which cancels in the product when it is
applied to both operands. It spreads an outlier over its group, so that one value does not determine the block scale.
Size 16 with one fixed vector of signs is NVIDIA's (2509.25149). Size 128 with new random signs makes MS-EDEN unbiased
(2601.22813).

The operations and their order are those of NVIDIA's reference (transformer-engine 2.20), and the results are
bit-identical, for all options that it has. Divisions are correctly rounded on a GPU too (with a Python number as
divisor, torch would multiply by its inverse). A tensor with NaN or infinity gives NaN or infinity through its scales,
so that a check for finite values detects it.

Sources: NVIDIA 2025 (arXiv 2509.25149); four over six, Cook et al. 2025 (2512.02010); MS-EDEN, Panferov et al. 2026
(2601.22813), with the correction computed from x and q that include the block scales, as in EDEN's proof.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.config.recipes import Operand
from deskside.kernels.nvfp4.operand import (
    BLOCK,
    EDEN_GROUP,
    EDEN_OVERRIDE,
    Along,
    check_divisible,
    check_operand,
    check_signs,
    nvidia_signs,
)
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

FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Quantized:
    """A quantized (N, K) matrix, in the layout of its source for both values of `along`.

    codes: (N, K) uint8, E2M1. block_scale: E4M3, (N, K / 16) or, along rows, (N / 16, K); the scale of a
    16x16 tile is repeated 16 times. global_scale: float32 scalar. With a Hadamard transform, the values are the
    transformed ones.
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor
    along: Along

    @property
    def emulated(self) -> Tensor:
        """Return code x block scale, (N, K) bfloat16, exact. The product's epilogue multiplies by the global scale."""
        scale_G1R = self.block_scale.float().view(-1, 1, _stride(self.codes, self.along))
        values_GBR = _blocks(e2m1_decode(self.codes), self.along) * scale_G1R
        return values_GBR.bfloat16().view(self.codes.shape)

    def dequantized(self) -> Tensor:
        """Return the dequantized values, (N, K) float32."""
        return self.emulated.float() * self.global_scale


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
    """Quantize a float32 or bfloat16 matrix for a product that sums over its "columns" (K) or its "rows" (N).

    amax: float32 scalar, the largest magnitude of the transformed matrix. If None, it is computed.
    signs: (operand.hadamard,) of +-1. If None, NVIDIA's fixed vector; size 128 and `fresh_signs` need signs.
    noise: uniform in [0, 1), of x's shape for rounding "stochastic" and of block_scale's for "eden". If None, it is
        drawn with `generator`.
    Raises UsageError for options, shapes, signs and noise that are not valid for NVFP4.
    """
    check_operand(operand)
    check_divisible("the operand", (x_NK.shape[0], x_NK.shape[1]), operand, along)
    if operand.hadamard:
        check_signs(operand, signs, x_NK.device)
        x_NK = hadamard(x_NK, nvidia_signs(x_NK.device) if signs is None else signs, along)
    x_NK = x_NK.contiguous()
    # The order of a sum decides near-ties in four over six, so tiles are summed in the same order in both directions.
    direction: Along = "columns" if operand.scaling == "16x16" else along
    block_amax = _blocks(x_NK, direction).abs().amax(dim=1, keepdim=True).float()
    if operand.scaling == "16x16":
        block_amax = _over_tiles(block_amax, x_NK, _max_of_rows)
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
    """Scales of a whole tensor, computed from its amax; float32 scalars.

    encode: the factor that scales amax to `_block_target` x `_largest_scale`.
    decode: 1 / encode. block_encode: the factor from a block's amax to its ideal block scale. global_scale:
    equals `decode` up to rounding, but is NaN or infinite if the tensor contains such values.
    """

    amax: Tensor
    encode: Tensor
    decode: Tensor
    block_encode: Tensor
    global_scale: Tensor

    @staticmethod
    def of(amax: Tensor, operand: Operand) -> "_Scales":
        limit = _block_target(operand) * _largest_scale(operand)
        encode = (_scalar_like(amax, limit) / amax).clamp(max=FLOAT_MAX)
        encode = torch.where(encode == 0, 1.0, encode)  # 0 if amax is infinite
        # For an amax below about 8e-36, `encode` is clamped to the largest float32, so its inverse must be clamped too.
        global_scale = torch.maximum(amax / _scalar_like(amax, limit), _scalar_like(amax, 1 / FLOAT_MAX))
        return _Scales(amax, encode, encode.reciprocal(), encode * (1 / _block_target(operand)), global_scale)


def _block_target(operand: Operand) -> float:
    """Return the value that a block's largest one is scaled to before rounding: 6, or slightly more in MS-EDEN."""
    return 6.0 / EDEN_OVERRIDE if operand.rounding == "eden" else 6.0


def _largest_scale(operand: Operand) -> float:
    """Return 448, or 256 if a block scale may still grow: by 1.5 in four over six, by the correction in MS-EDEN."""
    return 256.0 if operand.four_over_six or operand.rounding == "eden" else LARGEST["e4m3"]


def _scaled(x_GBR: Tensor, block_scale: Tensor, scales: _Scales) -> Tensor:
    """Return x / (block scale x global scale), clamped to +-6. A block with scale 0 decodes to zeros in any case."""
    encode = (block_scale.float() * scales.decode).reciprocal().clamp(max=FLOAT_MAX)
    return (x_GBR * encode).clamp(-6.0, 6.0) + 0.0  # a negative zero becomes zero, as in the reference


def _four_over_six(
    x_GBR: Tensor, block_amax: Tensor, scales: _Scales, operand: Operand, x_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return code values and block scales.

    The largest value of each block (or tile) is mapped to 6 or 4, whichever has the smaller squared error; to 6 if they
    are equal.
    """
    base = block_amax / _scalar_like(block_amax, 6.0) * scales.encode
    candidates = []
    for stretch in (1.0, 1.5):
        block_scale = to_fp8(base * stretch, "e4m3")
        values = e2m1_nearest(_scaled(x_GBR, block_scale, scales))
        decoded = (
            values * block_scale.float() * scales.amax / _scalar_like(x_GBR, 6.0 * _largest_scale(operand))
        )
        squares = (decoded - x_GBR).square()
        # Added one by one, because the order of a float32 sum decides near-ties, and the reference uses this order.
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
    """Return the block scales times <x, x> / <x, q> of their group of 128 values, in float32.

    x is multiplied by the global `encode` first, so that its squares neither overflow nor underflow.
    """
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
    """View (N, K) as (G, 16, R), with blocks along the middle dimension for both values of `along`."""
    return x_NK.view(-1, BLOCK, _stride(x_NK, along))


def _scale_shape(x_NK: Tensor, along: Along) -> torch.Size:
    N, K = x_NK.shape
    return torch.Size((N, K // BLOCK) if along == "columns" else (N // BLOCK, K))


def _over_tiles(per_block: Tensor, x_NK: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce one value per block over the 16 rows of each tile.

    per_block: (N K / 16, 1, 1), for blocks along columns. Returns the same shape.
    """
    N, K = x_NK.shape
    tiles = reduce(per_block.view(N // BLOCK, BLOCK, K // BLOCK))
    return tiles.expand(-1, BLOCK, -1).reshape(per_block.shape)


def _max_of_rows(x_TBC: Tensor) -> Tensor:
    return x_TBC.amax(dim=1, keepdim=True)


def _sum_in_halves(x_TBC: Tensor) -> Tensor:
    """Sum over the middle dimension by adding its second half to its first repeatedly, as a warp's reduction does."""
    while x_TBC.shape[1] > 1:
        first, second = x_TBC.chunk(2, dim=1)
        x_TBC = first + second
    return x_TBC


def _laid_out(block_scale: Tensor, x_NK: Tensor, direction: Along, along: Along) -> Tensor:
    if direction == along:
        return block_scale.view(_scale_shape(x_NK, along))
    per_tile = block_scale.view(_scale_shape(x_NK, direction))[::BLOCK]
    return per_tile.view(torch.uint8).repeat_interleave(BLOCK, dim=1).view(torch.float8_e4m3fn)


def _noise(
    noise: Tensor | None, shape: torch.Size, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    if noise is None:
        return torch.rand(shape, device=device, generator=generator)
    if noise.shape != shape:
        raise UsageError(f"noise must be {tuple(shape)}, but is {tuple(noise.shape)}")
    return noise


def _scalar_like(x: Tensor, value: float) -> Tensor:
    """Return a float32 scalar tensor on x's device. Division by a tensor is not replaced by a multiplication."""
    return torch.full((), value, dtype=torch.float32, device=x.device)


def draw_signs(size: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Return (size,) random signs, +1 or -1 in float32."""
    return torch.randint(0, 2, (size,), device=device, generator=generator).float() * 2 - 1


def hadamard(x_NK: Tensor, signs_S: Tensor, along: Along) -> Tensor:
    """Transform groups of S = len(signs) values along dimension 1 ("columns") or dimension 0 ("rows").

    S must be a power of two that divides the dimension. Sums are in float32. The result has x's dtype for S = 16, where
    NVIDIA's kernels also round to bfloat16, and is float32 for any other S.
    """
    (N, K), S = x_NK.shape, len(signs_S)
    R = 1 if along == "columns" else K  # memory stride between the values of a group
    # Without scaling first, sums would overflow from 2e37 on. Scaling by a power of two is exact.
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
