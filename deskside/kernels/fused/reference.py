"""The fused operators in plain torch: what the Triton kernels are tested against, and what runs on a CPU.

All take flattened tokens (N = B T). Inputs may be any floating dtype; arithmetic is in float32, or float64 where the
inputs are. Backward forms come from autograd on the forward forms, so that no derivative is written by hand twice.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.kernels.functional import ACTIVATIONS, at_least_float32

Angles = tuple[Tensor, Tensor] | None


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


def cast_fp8(x: Tensor, cast: Cast) -> Fp8:
    """A tensor (N, K) that exists already, cast to FP8."""
    torch.maximum(cast.amax, x.detach().abs().max().to(cast.amax.dtype), out=cast.amax)
    scaled = (x.to(at_least_float32(x)) * cast.scale).clamp(-cast.largest, cast.largest)
    rows = scaled.to(cast.dtype)
    return Fp8(rows, rows.T.contiguous())


def row_col_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of the rows (N,) and of the columns (K,), float32, in one pass."""
    magnitudes = x.detach().abs().float()
    return magnitudes.amax(1), magnitudes.amax(0)


def cast_both(x: Tensor, dtype: torch.dtype, of_rows: Tensor, of_columns: Tensor) -> Fp8:
    """FP8 rows (N, K) under a scale each, and the transpose with a scale for each of its rows (the columns of x)."""
    limit, x = torch.finfo(dtype).max, x.float()
    rows = (x * of_rows[:, None]).clamp(-limit, limit).to(dtype)
    return Fp8(rows, (x * of_columns).clamp(-limit, limit).to(dtype).T.contiguous())


def transpose(rows: Tensor, out: Tensor) -> None:
    """Write the transpose of an FP8 matrix (N, K), whose N is a multiple of 4, into `out` (K, N).

    `out` may be some columns of a wider matrix that begin at, and whose rows are, multiples of 4.
    """
    out.copy_(rows.T)


def _finish(values: Tensor, cast: Cast | None, dtype: torch.dtype) -> Tensor | Fp8:
    return values.to(dtype) if cast is None else cast_fp8(values, cast)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.to(at_least_float32(x))
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, cast: Cast | None = None
) -> tuple[Tensor, Tensor | Fp8, Tensor]:
    """(residual + delta, its RMSNorm, 1 / its root mean square (N,) in float32). Without delta the residual is kept.

    cast: write the norm in FP8, in rows and in columns, instead of the input's dtype.
    """
    out = residual if delta is None else residual + delta
    x = out.to(at_least_float32(out))
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    return out, _finish(_norm(out, weight, eps), cast, residual.dtype), rstd


def add_norm_backward(
    grad_normed: Tensor,
    residual_out: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad_residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(the gradient of both residual and delta, the gradient of the weight in float32).

    `grad_residual` is what reached the residual's output from above; None is zero.
    """
    x, dtype = residual_out.to(at_least_float32(residual_out)), at_least_float32(residual_out)
    normal = x * rstd[:, None]
    grad = grad_normed.to(dtype)
    grad_weight = (grad * normal).sum(0)
    grad = grad * weight.to(dtype)
    grad = (grad - normal * (grad * normal).mean(-1, keepdim=True)) * rstd[:, None]
    if grad_residual is not None:
        grad = grad + grad_residual
    return grad.to(residual_out.dtype), grad_weight


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    angles: Angles,
    layout: QkvLayout,
) -> tuple[Tensor, Tensor]:
    """Queries (N, H, C) and keys (N, K, C), normalised per head (weights None: not) and turned (angles None: not).

    angles: cos and sin, (P, C / 2) float32, for token n the row n mod P.
    """
    q, k, _ = layout.split(qkv)
    return tuple(  # type: ignore[return-value]
        _turn(x if weight is None else _norm(x, weight, layout.eps), angles).to(qkv.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def _turn(x_NHC: Tensor, angles: Angles) -> Tensor:
    x = x_NHC.to(at_least_float32(x_NHC))
    if angles is None:
        return x
    cos, sin = (t.to(x.dtype).repeat(len(x) // len(t), 1)[:, None] for t in angles)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    angles: Angles,
    layout: QkvLayout,
    cast: Cast | None = None,
) -> tuple[Tensor | Fp8, Tensor | None, Tensor | None]:
    """From the gradients of q, k and v: those of qkv (N, W) and of the two norm weights (float32)."""
    with torch.enable_grad():
        leaf = qkv.detach().to(at_least_float32(qkv)).requires_grad_()
        weights = [
            None if w is None else w.detach().to(leaf.dtype).requires_grad_() for w in (q_weight, k_weight)
        ]
        q, k = qk_norm_rope(leaf, weights[0], weights[1], angles, layout)
        outputs = (q, k, layout.split(leaf)[2])
        wanted = [leaf, *(w for w in weights if w is not None)]
        grad, *rest = torch.autograd.grad(outputs, wanted, [g.to(leaf.dtype) for g in grads])
    if q_weight is None:
        return _finish(grad, cast, qkv.dtype), None, None
    return _finish(grad, cast, qkv.dtype), rest[0], rest[1]


def gated(x: Tensor, kind: str, two: bool, cast: Cast | None = None) -> Tensor | Fp8:
    """activation(gate) * up of x (N, 2F), or activation(x) of x (N, F) where not `two`. kind: as in ops.composite."""
    return _finish(_hidden(x.to(at_least_float32(x)), kind, two), cast, x.dtype)


def _hidden(x: Tensor, kind: str, two: bool) -> Tensor:
    first, *up = x.chunk(2, dim=-1) if two else (x,)
    hidden = ACTIVATIONS[kind](first)
    return hidden * up[0] if up else hidden


def gated_backward(grad: Tensor, x: Tensor, kind: str, two: bool, cast: Cast | None = None) -> Tensor | Fp8:
    """The gradient of x, from that of the hidden values (N, F)."""
    with torch.enable_grad():
        leaf = x.detach().to(at_least_float32(x)).requires_grad_()
        (grad_x,) = torch.autograd.grad(_hidden(leaf, kind, two), leaf, grad.to(leaf.dtype))
    return _finish(grad_x, cast, x.dtype)
