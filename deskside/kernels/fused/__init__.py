"""Fused element-wise operators of a block, forward and backward, each in one kernel on a GPU.

The plain torch form in `reference` is what runs on a CPU and what the kernels are tested against. All take flattened
tokens (N = B T). `cast` asks for the result in FP8, in rows and in columns, instead of the input's dtype.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from deskside.kernels.fused import reference
from deskside.kernels.fused.types import Cast, Fp8, QkvLayout

__all__ = [
    "Cast",
    "Fp8",
    "QkvLayout",
    "add_norm",
    "add_norm_backward",
    "cast_both",
    "cast_fp8",
    "gated",
    "gated_backward",
    "row_col_amax",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "transpose",
    "writes_fp8",
]

Angles = tuple[Tensor, Tensor] | None


def _backend(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return reference
    from deskside.kernels.fused import launch

    return launch


@cache
def writes_fp8(device: torch.device) -> bool:
    """Return whether the fused operators can write FP8 here: it needs the conversion of compute capability 8.9."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def cast_fp8(x_NK: Tensor, cast: Cast) -> Fp8:
    """A tensor that exists already, cast to FP8; in plain torch on a card whose kernels cannot."""
    backend = _backend(x_NK) if writes_fp8(x_NK.device) else reference
    out: Fp8 = backend.cast_fp8(x_NK, cast)
    return out


def row_col_amax(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of the rows (N,) and of the columns (K,), float32, in one pass."""
    out: tuple[Tensor, Tensor] = _backend(x_NK).row_col_amax(x_NK)
    return out


def cast_both(x_NK: Tensor, dtype: torch.dtype, row_scale_N: Tensor, column_scale_K: Tensor) -> Fp8:
    """FP8 rows under a scale each, and the transpose with a scale for each of its rows (the columns of x)."""
    backend = _backend(x_NK) if writes_fp8(x_NK.device) else reference
    out: Fp8 = backend.cast_both(x_NK, dtype, row_scale_N, column_scale_K)
    return out


def transpose(rows_NK: Tensor, out_KN: Tensor) -> None:
    """Write the transpose of an FP8 matrix, whose N is a multiple of 4.

    out_KN may be some columns of a wider matrix that begin at, and whose rows are, multiples of 4.
    """
    _backend(rows_NK).transpose(rows_NK, out_KN)


def add_norm(
    residual_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, cast: Cast | None = None
) -> tuple[Tensor, Tensor | Fp8, Tensor]:
    """(residual + delta, its RMSNorm, 1 / its root mean square (N,) in float32). Without delta the residual is kept."""
    out: tuple[Tensor, Tensor | Fp8, Tensor] = _backend(residual_ND).add_norm(
        residual_ND, delta_ND, weight_D, eps, cast
    )
    return out


def add_norm_backward(
    grad_normed_ND: Tensor,
    residual_out_ND: Tensor,
    rstd_N: Tensor,
    weight_D: Tensor,
    grad_residual_ND: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(the gradient of both residual and delta, the gradient of the weight in float32).

    `grad_residual_ND` is what reached the residual's output from above; None is zero.
    """
    out: tuple[Tensor, Tensor] = _backend(grad_normed_ND).add_norm_backward(
        grad_normed_ND, residual_out_ND, rstd_N, weight_D, grad_residual_ND
    )
    return out


def qk_norm_rope(
    qkv_NW: Tensor, q_weight_C: Tensor | None, k_weight_C: Tensor | None, angles: Angles, layout: QkvLayout
) -> tuple[Tensor, Tensor]:
    """Queries (N, H, C) and keys (N, K, C), normalised per head (weights None: not) and turned (angles None: not).

    angles: cos and sin, (P, C / 2) float32, for token n the row n mod P.
    """
    out: tuple[Tensor, Tensor] = _backend(qkv_NW).qk_norm_rope(qkv_NW, q_weight_C, k_weight_C, angles, layout)
    return out


def qk_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_NW: Tensor,
    q_weight_C: Tensor | None,
    k_weight_C: Tensor | None,
    angles: Angles,
    layout: QkvLayout,
    cast: Cast | None = None,
) -> tuple[Tensor | Fp8, Tensor | None, Tensor | None]:
    """From the gradients of q, k and v: those of qkv (N, W) and of the two norm weights (float32)."""
    out: tuple[Tensor | Fp8, Tensor | None, Tensor | None] = _backend(qkv_NW).qk_norm_rope_backward(
        grads, qkv_NW, q_weight_C, k_weight_C, angles, layout, cast
    )
    return out


def gated(x: Tensor, kind: str, two: bool, cast: Cast | None = None) -> Tensor | Fp8:
    """activation(gate) * up of x (N, 2F), or activation(x) of x (N, F) where not `two`. kind: as in ops.composite."""
    out: Tensor | Fp8 = _backend(x).gated(x, kind, two, cast)
    return out


def gated_backward(
    grad_NF: Tensor, x: Tensor, kind: str, two: bool, cast: Cast | None = None
) -> Tensor | Fp8:
    """The gradient of x, from that of the hidden values."""
    out: Tensor | Fp8 = _backend(x).gated_backward(grad_NF, x, kind, two, cast)
    return out
