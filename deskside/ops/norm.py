"""RMSNorm and LayerNorm over the last dimension, computed in float32 whatever the activations are.

Papers: LayerNorm, Ba et al. 2016 (arXiv 1607.06450); RMSNorm, Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deskside.kernels.functional import at_least_float32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. (..., size) -> (..., size), dtype of x."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = at_least_float32(x)
        return F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension. (..., size) -> (..., size), dtype of x."""

    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = at_least_float32(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.layer_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"


Norm = RMSNorm | LayerNorm


def make_norm(kind: Literal["rmsnorm", "layernorm"], size: int, eps: float, bias: bool) -> Norm:
    """The norm of a configuration. `bias` is LayerNorm's alone."""
    return LayerNorm(size, eps, bias) if kind == "layernorm" else RMSNorm(size, eps)
