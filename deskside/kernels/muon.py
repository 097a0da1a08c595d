"""The element-wise halves of a Muon step, before and after Newton-Schulz, for one slice of one weight.

    look_ahead   gradient, momentum -> new momentum, and the direction that Newton-Schulz makes orthogonal
    apply        orthogonal update, its factors per row, weight -> new weight

Newton-Schulz runs on stacks of slices with one shape. Both functions read and write each tensor once and in place: a
slice is a view (experts, rows, columns) of its parameter, and its part of the stack is also a view, transposed where
the stack holds it transposed. On CUDA each function is one Triton kernel: look_ahead moves 14 bytes per weight (float32
gradient read, momentum read and written, bfloat16 direction written), apply 10 (bfloat16 update read, float32 weight
read and written). Elsewhere the plain torch below runs, which is also the reference for the kernels.
"""

import torch
from torch import Tensor

from deskside.kernels.functional import at_least_float32
from deskside.kernels.stochastic_rounding import round_to_bfloat16


def look_ahead(
    g_ERC: Tensor, m_ERC: Tensor, out_ERC: Tensor, momentum: float, nesterov: bool, skip: Tensor, fused: bool
) -> None:
    """Update the momentum in place, and write the direction, with Nesterov's look-ahead if `nesterov`, to `out`.

    m: float32 or float64, or bfloat16 with arithmetic in float32. out: may be g itself. skip: float scalar on the
    device; 1 leaves the momentum unchanged and keeps NaN in the gradient out of `out`.
    """
    if fused:
        from deskside.kernels.muon_triton import look_ahead as kernel

        kernel(g_ERC, m_ERC, out_ERC, momentum, nesterov, skip)
        return
    m = m_ERC.to(at_least_float32(m_ERC))
    g = torch.where(skip > 0, m, g_ERC.to(m.dtype))
    m = torch.lerp(m, g, 1 - momentum)
    m_ERC.copy_(m)
    out_ERC.copy_(torch.lerp(g, m, momentum) if nesterov else m)


def apply(
    p_ERC: Tensor,
    u_ERC: Tensor,
    factors_ERC: Tensor,
    lr: float,
    weight_decay: float,
    cautious: bool,
    skip: Tensor,
    fused: bool,
    seed: int = 0,
) -> None:
    """Compute p -= lr * factors * u + weight_decay * p in place; skip 1 leaves p unchanged.

    lr: already multiplied by the slice's scale. weight_decay: already multiplied by the learning rate. cautious: decay
    only where the update moves the weight towards zero (arXiv 2510.12402). factors: may be a broadcast view.
    seed: of the stochastic rounding of weights in bfloat16, by the element's index in this slice.
    """
    if fused:
        from deskside.kernels.muon_triton import apply as kernel

        kernel(p_ERC, u_ERC, factors_ERC, lr, weight_decay, cautious, skip, seed)
        return
    p = p_ERC.to(factors_ERC.dtype)
    u = u_ERC.to(p.dtype) * factors_ERC
    decay = weight_decay * p
    if cautious:
        decay = torch.where(u * p >= 0, decay, 0.0)
    new = p - lr * u - decay
    if p_ERC.dtype == torch.bfloat16:
        new = round_to_bfloat16(new.flatten(), seed).view_as(p).to(p.dtype)
    p_ERC.copy_(torch.where(skip > 0, p, new))
