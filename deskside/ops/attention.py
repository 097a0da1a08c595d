"""Attention and rotary position embedding.

RoPE (Su et al. 2021, arXiv 2104.09864) rotates channel pairs of q and k by an angle proportional to the position, so
that their dot product depends on the distance alone. Channels c and c + C/2 form a pair with angle position *
theta^(-2c/C). This is Hugging Face's half-rotation layout, so Qwen and Llama weights need no permutation on import or
export.
"""

import torch
from torch import Tensor

from deskside.kernels.attention import AttentionContext, backend_named
from deskside.kernels.functional import at_least_float32


def attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """Compute (B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C) with the backend of a prepared `context`."""
    return backend_named(context.backend).function(q_BTHC, k_BTKC, v_BTKC, context)


def rope_table(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (positions, head_dim / 2) in float32; on the meta device only their shapes."""
    if device.type == "meta":
        # Arithmetic on meta tensors imports torch._dynamo, which takes more than a second.
        shapes = torch.empty(2, positions, head_dim // 2, dtype=torch.float32, device=device)
        return shapes[0], shapes[1]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BTHC: Tensor, cos_BT1c: Tensor, sin_BT1c: Tensor) -> Tensor:
    """Rotate every pair of channels by its angle. cos and sin have C/2 channels and broadcast over rows and heads."""
    dtype = at_least_float32(x_BTHC)
    first, second = x_BTHC.to(dtype).chunk(2, dim=-1)
    cos, sin = cos_BT1c.to(dtype), sin_BT1c.to(dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHC.dtype)
