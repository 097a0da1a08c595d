"""Attention outside of autograd: a forward that hands out what its backward needs, and that backward.

A block whose gradients are written by hand (one autograd.Function for half a block) calls these two. A backend that
has its kernels as plain functions (`AttentionBackend.pair`) is called directly. For any other one, the forward runs the
backend under autograd on detached inputs and the backward asks autograd for that small graph's gradients; this is
right for every backend and costs some host time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.kernels.attention.context import AttentionContext, FwdBwd, Kept, backend_named
from deskside.utils.errors import RunError


@dataclass
class SavedAttention:
    """State that a forward keeps for its backward, which clears it."""

    pair: FwdBwd
    context: AttentionContext
    kept: Kept | None


def attention_forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, SavedAttention]:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (o_BTHC, saved). `context` has been through `prepare`.

    The inputs may be strided views, of one fused projection for example. They are kept, not copied: the caller must
    not write into them before the backward. `o_BTHC` carries no gradient.
    """
    pair = backend_named(context.backend).pair or AUTOGRAD
    o_BTHC, kept = pair.forward(q_BTHC, k_BTKC, v_BTKC, context)
    return o_BTHC, SavedAttention(pair, context, kept)


def attention_backward(saved: SavedAttention, grad_o_BTHC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_BTHC, dk_BTKC, dv_BTKC). Frees what was saved. Raises RunError when it is called twice."""
    kept, saved.kept = saved.kept, None
    if kept is None:
        raise RunError("the backward of this attention has been computed before, and freed what it needs")
    return saved.pair.backward(kept, grad_o_BTHC, saved.context)


def _forward_by_autograd(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Kept]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q_BTHC, k_BTKC, v_BTKC))
    with torch.enable_grad():
        o_BTHC = backend_named(context.backend).function(q, k, v, context)
    return o_BTHC.detach(), (o_BTHC, q, k, v)


def _backward_by_autograd(
    kept: Kept, grad_o_BTHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    o_BTHC, *leaves = kept
    dq_BTHC, dk_BTKC, dv_BTKC = torch.autograd.grad(o_BTHC, leaves, grad_o_BTHC)
    return dq_BTHC, dk_BTKC, dv_BTKC


AUTOGRAD = FwdBwd(_forward_by_autograd, _backward_by_autograd)  # for backends without a pair of their own
