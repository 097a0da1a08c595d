"""Attention outside of autograd: a forward that returns the state for its backward, and the backward.

They are for blocks whose gradients are written by hand (one autograd.Function for half a block). A backend with an
explicit forward and backward (`AttentionBackend.pair`) is called directly. For any other backend, the forward runs it
under autograd on detached inputs, and the backward calls autograd on this small graph; this works for every backend but
takes more host time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.kernels.attention.context import AttentionContext, FwdBwd, Saved, backend_named
from deskside.utils.errors import RunError


@dataclass
class SavedAttention:
    """The state that a forward saves for its backward. The backward sets `saved` to None."""

    pair: FwdBwd
    context: AttentionContext
    saved: Saved | None


def attention_forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, SavedAttention]:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (o_BTHC, state). `context` is the result of `prepare`.

    The inputs may be strided views, of a fused projection for example. They are saved without a copy, so the caller
    must not modify them before the backward. `o_BTHC` requires no gradient.
    """
    pair = backend_named(context.backend).pair or AUTOGRAD
    o_BTHC, saved = pair.forward(q_BTHC, k_BTKC, v_BTKC, context)
    return o_BTHC, SavedAttention(pair, context, saved)


def attention_output(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """Return only o_BTHC, for a forward that the backward recomputes. Nothing is saved, not even by autograd."""
    backend = backend_named(context.backend)
    if backend.pair is not None:
        return backend.pair.forward(q_BTHC, k_BTKC, v_BTKC, context)[0]
    with torch.no_grad():
        return backend.function(q_BTHC, k_BTKC, v_BTKC, context)


def attention_backward(state: SavedAttention, grad_o_BTHC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_BTHC, dk_BTKC, dv_BTKC), and free the saved state. Raises RunError if called twice."""
    saved, state.saved = state.saved, None
    if saved is None:
        raise RunError(
            "the backward of this attention has already run and freed its state; run the forward again"
        )
    return state.pair.backward(saved, grad_o_BTHC, state.context)


def _forward_by_autograd(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Saved]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q_BTHC, k_BTKC, v_BTKC))
    with torch.enable_grad():
        o_BTHC = backend_named(context.backend).function(q, k, v, context)
    return o_BTHC.detach(), (o_BTHC, q, k, v)


def _backward_by_autograd(
    saved: Saved, grad_o_BTHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    o_BTHC, *leaves = saved
    dq_BTHC, dk_BTKC, dv_BTKC = torch.autograd.grad(o_BTHC, leaves, grad_o_BTHC)
    return dq_BTHC, dk_BTKC, dv_BTKC


AUTOGRAD = FwdBwd(_forward_by_autograd, _backward_by_autograd)  # for backends without their own pair
