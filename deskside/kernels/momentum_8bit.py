"""Muon's momentum in 8 bits: whole multiples, from -127 to 127, of a scale for each block of 256 adjacent values.

The steps are even, unlike those of AdamW's 8-bit states. AdamW divides single values, so it needs the relative
precision of small ones. Muon orthogonalizes whole matrices, for which the root mean square error counts. One rounding
of normally distributed values adds 0.7 % of their root mean square here, and 1.1 % with the map of `adamw_state.py`;
the errors of many steps add up. Gupta et al. 2025 (arXiv 2509.23106) find that Muon with such a momentum learns as
well as with float32.

Blocks are those of a whole parameter, not of the slices of a stack that `muon.look_ahead` reads. On CUDA, one Triton
kernel per parameter moves 10 bytes per weight: the gradient in float32 and the codes, read and written.
"""

import torch
from torch import Tensor

from deskside.kernels.adamw_state import BLOCK, SMALLEST_MAX

LARGEST = 127


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes (n,) int8, and the scale of each block (blocks,) float32, of values (n,)."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(dim=1) / LARGEST
    inverse = torch.where(scales > SMALLEST_MAX, 1 / scales, 0.0)
    codes = torch.floor(padded * inverse[:, None] + 0.5)
    return codes.flatten()[: x.numel()].to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values (n,) of codes (n,) with the scales of their blocks (blocks,)."""
    return codes.float() * scales.repeat_interleave(BLOCK)[: codes.numel()]


def look_ahead_8bit(
    g: Tensor,
    codes: Tensor,
    scales: Tensor,
    momentum: float,
    nesterov: bool,
    skip: Tensor,
    clip: Tensor | None = None,
    fused: bool = False,
) -> None:
    """Update the momentum in place, and overwrite the gradient with the direction; see `muon.look_ahead`.

    The direction is computed from the new momentum before it is rounded to 8 bits.

    Args:
        g: Gradient (n,), contiguous.
        codes, scales: The momentum, as `quantize` returns it.
        skip: Float scalar on the device; 1 leaves the momentum unchanged, and makes it the direction.
        fused: Run the Triton kernel.
    """
    if fused:
        from deskside.kernels.momentum_8bit_triton import launch

        launch(g, codes, scales, momentum, nesterov, skip, clip, LARGEST)
        return
    old = dequantize(codes, scales)
    gradient = g.float() if clip is None else g.float() * clip
    new = torch.lerp(old, gradient, 1 - momentum)
    direction = torch.lerp(gradient, new, momentum) if nesterov else new
    g.copy_(torch.where(skip > 0, old, direction))
    new_codes, new_scales = quantize(new)
    codes.copy_(torch.where(skip > 0, codes, new_codes))
    scales.copy_(torch.where(skip > 0, scales, new_scales))
