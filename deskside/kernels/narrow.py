"""Linear layers of few tokens, as in a decoding step, with the operations around them in the same kernel.

Such a product reads every weight once and computes next to nothing, so memory bandwidth limits it if the weights are
large, and the length of the chain of kernels if they are small. One kernel here adds the residual, normalises,
multiplies, adds the bias and applies the gated activation, which are three kernels otherwise. Each program computes a
few outputs for all tokens, so that hundreds of programs read the weights. Each normalises all tokens for itself: the
norm's factor of a token is a scalar, and is applied to the sums of the products at the end.
"""

import torch
from torch import Tensor

MAX_TOKENS = 64
# Products of up to this many tokens use the kernels. No GPU has run them yet; `benchmarks.decode --narrow` measures.
USED_UP_TO = 0
DTYPES = frozenset({torch.bfloat16, torch.float32})  # before its division by the norm, x might exceed float16


def covers(x_NK: Tensor, weight_FK: Tensor) -> bool:
    """Return True if the kernels take these: few tokens on a GPU, in the dtype of the weight."""
    return (
        x_NK.is_cuda
        and x_NK.dtype in DTYPES
        and x_NK.dtype == weight_FK.dtype
        and len(x_NK) <= MAX_TOKENS
        and weight_FK.is_contiguous()
    )


def used(x_NK: Tensor, weight_FK: Tensor) -> bool:
    """Return True if the kernels take these and are used for this many tokens."""
    return len(x_NK) <= USED_UP_TO and covers(x_NK, weight_FK)


def linear(x_NK: Tensor, weight_FK: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return x W^T + b: (N, F)."""
    from deskside.kernels.narrow_triton import launch

    return launch(x_NK, weight_FK, bias_F)[1]


def add_norm_linear(
    residual_ND: Tensor,
    delta_ND: Tensor,
    norm: tuple[Tensor, float],
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    activation: tuple[str, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return residual + delta and the linear layer of its RMSNorm: (N, D), (N, F).

    norm: weight and eps. activation: its name, and whether it is gated. Gated, the weight has 2F rows, first those of
    the gate, and the result is activation(gate) * up.
    """
    from deskside.kernels.narrow_triton import launch

    return launch(residual_ND, weight_FD, bias_F, (delta_ND, *norm), activation)
