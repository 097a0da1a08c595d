"""The element-wise halves of a Muon step, before and after Newton-Schulz, for one slice of one weight.

    look_ahead   gradient, momentum -> momentum, and what is to be made orthogonal, written into its stack
    apply        orthogonal update, its rows' factors, weight -> weight

Both read and write each tensor once, where it lies: a slice is a view (experts, rows, columns) of its parameter, and
its place in a stack is a view too, turned where the stack is turned. On CUDA each is one Triton kernel: 14 bytes per
weight before (float32 gradient read, momentum read and written, bfloat16 look-ahead written) and 10 after (bfloat16
update read, float32 weight read and written). Elsewhere the plain torch below, which is also what the kernels are
tested against.
"""

import torch
from torch import Tensor


def look_ahead(
    g_ERC: Tensor, m_ERC: Tensor, out_ERC: Tensor, momentum: float, nesterov: bool, skip: Tensor, fused: bool
) -> None:
    """Advances the momentum in place, and writes the direction (looked ahead, if `nesterov`).

    m: float32 or float64, or bfloat16, whose arithmetic is float32's. out: may be g itself. skip: float scalar on the
    device; at 1 the momentum stays, and no NaN of the gradient reaches `out`.
    """
    if fused:
        from deskside.kernels.muon_triton import look_ahead as kernel

        kernel(g_ERC, m_ERC, out_ERC, momentum, nesterov, skip)
        return
    m = m_ERC.float() if m_ERC.dtype == torch.bfloat16 else m_ERC
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
) -> None:
    """p -= lr (factor u) + weight_decay p, in place; nothing where skip is 1.

    lr: times the slice's scale; weight_decay: times the learning rate; cautious: decay only where the update moves the
    weight towards zero (arXiv 2510.12402). factors: broadcast views, read through their strides.
    """
    if fused:
        from deskside.kernels.muon_triton import apply as kernel

        kernel(p_ERC, u_ERC, factors_ERC, lr, weight_decay, cautious, skip)
        return
    p = p_ERC.to(factors_ERC.dtype)
    u = u_ERC.to(p.dtype) * factors_ERC
    decay = weight_decay * p
    if cautious:
        decay = torch.where(u * p >= 0, decay, 0.0)
    p_ERC.copy_(torch.where(skip > 0, p, p - lr * u - decay))
