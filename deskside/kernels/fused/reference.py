"""The fused operators in plain torch: the implementation for CPUs, and the reference of the Triton kernels.

All take flattened tokens (N = B T). Inputs may have any floating dtype; arithmetic is in float32, or in float64 for
float64 inputs. Most backward functions run autograd on the forward, so that the tests compare the kernels' derivatives
with autograd's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.kernels.functional import activate, at_least_float32, rotate

Angles = tuple[Tensor, Tensor] | None  # cos and sin, (P, C / 2) each; None: no rotary embedding


@dataclass(frozen=True)
class Cast:
    """Parameters of a cast to FP8.

    scale: float32 scalar on the device that values are multiplied by before they are saturated. amax: float32 scalar on
    the device, raised in place to the largest magnitude of the unscaled values.
    """

    dtype: torch.dtype
    scale: Tensor
    amax: Tensor

    @property
    def largest(self) -> float:
        """Largest finite value of the dtype."""
        return float(torch.finfo(self.dtype).max)


@dataclass(slots=True)
class Fp8:
    """An FP8 matrix (N, K) and its transpose, the operands of two products. Both are contiguous."""

    rows: Tensor  # (N, K)
    columns: Tensor  # (K, N)


@dataclass(frozen=True)
class QkvLayout:
    """Layout of a fused projection's row: `heads` queries, `kv_heads` keys, `kv_heads` values of `head_dim` channels.

    eps: that of the QK-norm.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def width(self) -> int:
        """Number of channels of a row."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, width) -> views (N, heads, head_dim), (N, kv_heads, head_dim) twice."""
        x = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = x.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v


def cast_fp8(x: Tensor, cast: Cast) -> Fp8:
    """Cast a tensor (N, K) to FP8 with one scale, and update `cast.amax`."""
    torch.maximum(cast.amax, x.detach().abs().max().to(cast.amax.dtype), out=cast.amax)
    scaled = (x.to(at_least_float32(x)) * cast.scale).clamp(-cast.largest, cast.largest)
    rows = scaled.to(cast.dtype)
    return Fp8(rows, rows.T.contiguous())


def row_col_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes of the rows (N,) and of the columns (K,), float32."""
    magnitudes = x.detach().abs().float()
    return magnitudes.amax(1), magnitudes.amax(0)


def cast_both(x: Tensor, dtype: torch.dtype, row_scale: Tensor, column_scale: Tensor) -> Fp8:
    """Cast x (N, K) to FP8 rows with a scale per row, (N,), and to FP8 columns with a scale per column, (K,)."""
    limit, x = torch.finfo(dtype).max, x.float()
    rows = (x * row_scale[:, None]).clamp(-limit, limit).to(dtype)
    return Fp8(rows, (x * column_scale).clamp(-limit, limit).to(dtype).T.contiguous())


def transpose(rows: Tensor, out: Tensor) -> None:
    """Write the transpose of an FP8 matrix (N, K), whose N is a multiple of 4, into `out` (K, N).

    `out` may be a slice of columns of a wider matrix; its first column and its row stride must be multiples of 4.
    """
    out.copy_(rows.T)


def _to_output(values: Tensor, cast: Cast | None, dtype: torch.dtype) -> Tensor | Fp8:
    """Convert to `dtype`, or to FP8 if there is a cast."""
    return values.to(dtype) if cast is None else cast_fp8(values, cast)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.to(at_least_float32(x))
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def add_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, cast: Cast | None = None
) -> tuple[Tensor, Tensor | Fp8, Tensor]:
    """Return residual + delta, its RMSNorm, and 1 / its root mean square (N,) in float32. delta None is zero.

    cast: return the norm in FP8, as rows and columns, instead of the input's dtype.
    """
    out = residual if delta is None else residual + delta
    x = out.to(at_least_float32(out))
    rstd = torch.rsqrt(x.square().mean(-1) + eps)
    return out, _to_output(_norm(out, weight, eps), cast, residual.dtype), rstd


def add_norm_backward(
    grad_normed: Tensor,
    residual_out: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grad_residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of residual and delta, which is the same, and that of the weight in float32.

    grad_residual: the gradient of the output residual + delta; None is zero.
    """
    x, dtype = residual_out.to(at_least_float32(residual_out)), at_least_float32(residual_out)
    normed = x * rstd[:, None]
    grad = grad_normed.to(dtype)
    grad_weight = (grad * normed).sum(0)
    grad = grad * weight.to(dtype)
    grad = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd[:, None]
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
    """Return queries (N, H, C) and keys (N, K, C) after QK-norm (weights None: none) and RoPE (angles None: none).

    angles: cos and sin, (P, C / 2) float32; token n has row n mod P.
    """
    q, k, _ = layout.split(qkv)
    return tuple(  # type: ignore[return-value]
        _rotate(x if weight is None else _norm(x, weight, layout.eps), angles).to(qkv.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def _rotate(x_NHC: Tensor, angles: Angles) -> Tensor:
    if angles is None:
        return x_NHC
    cos, sin = (t.repeat(len(x_NHC) // len(t), 1)[:, None] for t in angles)
    return rotate(x_NHC, cos, sin)


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    angles: Angles,
    layout: QkvLayout,
    cast: Cast | None = None,
) -> tuple[Tensor | Fp8, Tensor | None, Tensor | None]:
    """Return the gradients of qkv (N, W) and of the two norm weights (float32), from those of q, k and v."""
    with torch.enable_grad():
        leaf = qkv.detach().to(at_least_float32(qkv)).requires_grad_()
        weights = [
            None if w is None else w.detach().to(leaf.dtype).requires_grad_() for w in (q_weight, k_weight)
        ]
        q, k = qk_norm_rope(leaf, weights[0], weights[1], angles, layout)
        outputs = (q, k, layout.split(leaf)[2])
        inputs = [leaf, *(w for w in weights if w is not None)]
        grad, *grad_weights = torch.autograd.grad(outputs, inputs, [g.to(leaf.dtype) for g in grads])
    if q_weight is None:
        return _to_output(grad, cast, qkv.dtype), None, None
    return _to_output(grad, cast, qkv.dtype), grad_weights[0], grad_weights[1]


def gated(x: Tensor, activation: str, has_gate: bool, cast: Cast | None = None) -> Tensor | Fp8:
    """Return activation(gate) * up for x = [gate, up] (N, 2F), or activation(x) for x (N, F) without `has_gate`."""
    return _to_output(_hidden(x.to(at_least_float32(x)), activation, has_gate), cast, x.dtype)


def _hidden(x: Tensor, activation: str, has_gate: bool) -> Tensor:
    return activate(activation, *x.chunk(2 if has_gate else 1, dim=-1))


def gated_backward(
    grad: Tensor, x: Tensor, activation: str, has_gate: bool, cast: Cast | None = None
) -> Tensor | Fp8:
    """Return the gradient of x, from `grad` (N, F), that of the output of `gated`."""
    with torch.enable_grad():
        leaf = x.detach().to(at_least_float32(x)).requires_grad_()
        (grad_x,) = torch.autograd.grad(_hidden(leaf, activation, has_gate), leaf, grad.to(leaf.dtype))
    return _to_output(grad_x, cast, x.dtype)
