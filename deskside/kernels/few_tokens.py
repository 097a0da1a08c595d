"""Linear layers of a decoding step, with the add and norm before and the activation after them in the same kernel.

A decoding step multiplies every weight with one token of each row. Reading the weights takes most of the time, and the
rest is latency: a kernel of a few microseconds waits for its launch, for its first bytes, and for its last block. So a
layer should have few kernels, and each should have all of its loads in flight at once. The kernels here read
their first weights, or ask for them to be moved to the L2 cache, before the kernel before them has finished
(`dependent_launch.py`). Every program computes the norm itself, and multiplies by its factor after the product, so that
the sum of squares and the product are one pass:

    w (x rstd g) = rstd (w (x g))

The norm's output is then never rounded to 16 bits, and x g is for several tokens, so results equal those of separate
kernels up to rounding. In float16, x g could overflow where x rstd g does not, so several tokens have a kernel for the
norm. They have one too if there is something to add before the norm: every program would read that as well. The layer
that computes it adds it instead (`residual_NF`).
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
    """Residual add and RMSNorm before a layer: x + delta is normalised. delta: (N, K), or None for 0; weight: (K,)."""

    delta_NK: Tensor | None
    weight_K: Tensor
    eps: float


def linear(
    x_NK: Tensor,
    weight_FK: Tensor,
    bias_F: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    residual_NF: Tensor | None = None,
) -> Tensor:
    """Return the output of a linear layer, (N, F).

    activation: applied to the product, with `gated` to its first half, which is then multiplied by the second half:
    weight and bias have 2 F rows. residual_NF: added to the output after it was rounded.
    """
    return _sum_and_output(x_NK, None, weight_FK, bias_F, activation, gated, residual_NF)[1]


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
    residual_NF: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if x_NK.is_cuda:
        from deskside.kernels.few_tokens_triton import launch

        return launch(x_NK, norm, weight_FK, bias_F, activation, gated, residual_NF)
    normed_NK = x_NK
    if norm is not None:
        x_NK = x_NK if norm.delta_NK is None else x_NK + norm.delta_NK
        dtype = at_least_float32(x_NK)
        normed_NK = F.rms_norm(x_NK.to(dtype), x_NK.shape[1:], norm.weight_K.to(dtype), norm.eps).to(
            x_NK.dtype
        )
    out_NF = F.linear(normed_NK, weight_FK, bias_F)
    if activation is not None and gated:
        gate_NF, up_NF = out_NF.chunk(2, dim=1)
        out_NF = ACTIVATIONS[activation](gate_NF) * up_NF
    elif activation is not None:
        out_NF = ACTIVATIONS[activation](out_NF)
    return x_NK, out_NF if residual_NF is None else residual_NF + out_NF


def supports(x_NK: Tensor, weight_FK: Tensor) -> bool:
    """Return True if the kernel takes this product: few tokens on a GPU, and weights of the same dtype."""
    few = x_NK.is_cuda and 0 < len(x_NK) <= MAX_TOKENS
    return few and x_NK.dtype in KERNEL_DTYPES and weight_FK.dtype == x_NK.dtype and weight_FK.is_contiguous()
