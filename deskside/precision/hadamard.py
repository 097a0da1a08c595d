"""The random Hadamard transform along the summed dimension of a product.

Each group of 16 or 128 values along that dimension is multiplied by diag(signs) H / sqrt(size), H the Sylvester
Hadamard matrix. That is a rotation: applied to both operands it cancels in their product, and it spreads an outlier
over its group, so that a block scale is not spent on one value. Size 16 with one fixed vector of signs is NVIDIA's
(arXiv 2509.25149); size 128 with signs drawn anew makes MS-EDEN unbiased (arXiv 2601.22813).
"""

import math
from typing import Literal

import torch
from torch import Tensor

Along = Literal["columns", "rows"]
_NVIDIA_NEGATIVE = 0xD7E8  # bit i: is sign i of transformer-engine's fixed vector of 16 negative?


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
    are float32. S must divide that dimension: `nvfp4.check_divisible` says so to a person.
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
