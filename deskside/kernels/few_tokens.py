"""Linear layers of a decoding step, with the add and norm before them and the activation after them in one kernel.

A decoding step multiplies every weight with one token of each row. Reading the weights takes most of the time, and the
rest is latency: a kernel of a few microseconds waits for its launch, for its first bytes, and for its last block. So a
layer should have few kernels, and each should have all of its loads in flight at once. The kernels here read their
first weights, or prefetch them into the L2 cache, before the previous kernel has finished (`dependent_launch.py`). For
one token, every program computes the norm itself, and multiplies by its factor after the product, so that the sum of
squares and the product are one pass:

    w (x rstd g) = rstd (w (x g))

The norm's output is then never rounded to 16 bits, so results equal those of separate kernels up to rounding. A few
tokens are computed in the same way, one by one. For 16 and more, this takes longer than a kernel for the norm.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.kernels.functional import ACTIVATIONS, at_least_float32

# Compared with torch for 124m in bfloat16, at 1, 16 and 64 tokens (docs/performance.md), not for larger models.
MAX_TOKENS = 64
KERNEL_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


class AddNorm(NamedTuple):
    """Residual add and RMSNorm before a layer: x + delta is normalized. delta: (N, K); weight: (K,)."""

    delta_NK: Tensor
    weight_K: Tensor
    eps: float


def linear(
    x_NK: Tensor,
    weight_FK: Tensor,
    bias_F: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Return the output of a linear layer, (N, F).

    activation: applied to the product, with `gated` to its first half, which is then multiplied by the second half:
    weight and bias have 2 F rows.
    """
    return _sum_and_output(x_NK, None, weight_FK, bias_F, activation, gated)[1]


def add_norm_linear(
    x_NK: Tensor,
    norm: AddNorm,
    weight_FK: Tensor,
    bias_F: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + norm.delta, (N, K), and the output of a linear layer for its norm, (N, F). Others: as `linear`."""
    return _sum_and_output(x_NK, norm, weight_FK, bias_F, activation, gated)


def _sum_and_output(
    x_NK: Tensor,
    norm: AddNorm | None,
    weight_FK: Tensor,
    bias_F: Tensor | None,
    activation: str | None,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    if x_NK.is_cuda:
        from deskside.kernels.few_tokens_triton import launch

        return launch(x_NK, norm, weight_FK, bias_F, activation, gated)
    normed_NK = x_NK
    if norm is not None:
        x_NK = x_NK + norm.delta_NK
        dtype = at_least_float32(x_NK)
        normed_NK = F.rms_norm(x_NK.to(dtype), x_NK.shape[1:], norm.weight_K.to(dtype), norm.eps).to(
            x_NK.dtype
        )
    out_NF = F.linear(normed_NK, weight_FK, bias_F)
    if activation is None:
        return x_NK, out_NF
    if not gated:
        return x_NK, ACTIVATIONS[activation](out_NF)
    gate_NF, up_NF = out_NF.chunk(2, dim=1)
    return x_NK, ACTIVATIONS[activation](gate_NF) * up_NF


def supports(x_NK: Tensor, weight_FK: Tensor) -> bool:
    """Return True if the kernel takes this product: few tokens on a GPU, and weights of the same dtype."""
    few = x_NK.is_cuda and 0 < len(x_NK) <= MAX_TOKENS
    return few and x_NK.dtype in KERNEL_DTYPES and weight_FK.dtype == x_NK.dtype and weight_FK.is_contiguous()
