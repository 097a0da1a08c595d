"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in Hugging Face's half-rotation layout.

Channel c and channel c + C/2 are one pair, turned by position * theta^(-2c/C). Published Qwen and Llama weights are in
this layout, so that no permutation is needed on import or export.
"""

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32


def rope_table(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each (positions, head_dim / 2), float32. On the meta device shapes alone."""
    if device.type == "meta":
        # Arithmetic is carried out in Python there, by rules that import torch._dynamo: more than a second.
        shapes = torch.empty(2, positions, head_dim // 2, dtype=torch.float32, device=device)
        return shapes[0], shapes[1]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BTHC: Tensor, cos_BT1c: Tensor, sin_BT1c: Tensor) -> Tensor:
    """Turn every pair of channels by its angle; cos and sin have C/2 channels and broadcast over rows and heads."""
    dtype = at_least_float32(x_BTHC)
    first, second = x_BTHC.to(dtype).chunk(2, dim=-1)
    cos, sin = cos_BT1c.to(dtype), sin_BT1c.to(dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHC.dtype)
