"""Arguments and results of the fused operators besides plain tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cast:
    """Parameters of a cast to FP8.

    scale: float32 scalar on the device; values are multiplied by it and saturated. amax: float32 scalar that is
    updated in place with the largest magnitude before scaling.
    """

    dtype: torch.dtype
    scale: Tensor
    amax: Tensor

    @property
    def largest(self) -> float:
        return float(torch.finfo(self.dtype).max)


@dataclass(slots=True)
class Fp8:
    """One tensor twice: rows (N, K) and columns (K, N), both contiguous."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class QkvLayout:
    """A fused projection's row: `heads` queries, `kv_heads` keys, `kv_heads` values of `head_dim` channels."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, width) -> views (N, heads, head_dim), (N, kv_heads, head_dim) twice."""
        x = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v
