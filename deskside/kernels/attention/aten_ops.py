"""torch's cuDNN and FlashAttention kernels called without SDPA's dispatch and without autograd.

Both are what SDPA and `varlen_attn` call in the end (torch 2.11 to 2.13 have the same signatures for the arguments
used here). cuDNN takes (B, H, T, C), which is a view of (B, T, H, C) and costs no copy; its gradients have the
strides of its inputs' order. FlashAttention takes (B, T, H, C) as it is, or (N, H, C) with document boundaries.
There is no dropout, so the random state that they hand out is never read.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.kernels.attention.context import AttentionContext, FwdBwd, Kept


def _cudnn_forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Kept]:
    q_BHTC, k_BKTC, v_BKTC = (tensor.detach().transpose(1, 2) for tensor in (q_BTHC, k_BTKC, v_BTKC))
    o_BHTC, lse, _, _, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BHTC, k_BKTC, v_BKTC, None, True, 0.0, context.causal, False, scale=context.scale
    )
    return o_BHTC.transpose(1, 2), (q_BHTC, k_BKTC, v_BKTC, o_BHTC, lse, seed, offset, max_q, max_k)


def _cudnn_backward(
    kept: Kept, grad_o_BTHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, max_q, max_k = kept
    bias = cu_q = cu_k = None
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_o_BTHC.transpose(1, 2),
        *tensors,
        bias,
        cu_q,
        cu_k,
        max_q,
        max_k,
        0.0,
        context.causal,
        scale=context.scale,
    )
    dq_BTHC, dk_BTKC, dv_BTKC = (gradient.transpose(1, 2) for gradient in gradients)
    return dq_BTHC, dk_BTKC, dv_BTKC


def _flash_masks(context: AttentionContext) -> dict[str, Any]:
    """Scale and window as the kernel wants them: tokens before and after the query, None for no limit."""
    if context.window is None:
        return {"scale": context.scale}
    after = 0 if context.causal else None
    return {"scale": context.scale, "window_size_left": context.window - 1, "window_size_right": after}


def flash_windowed(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """FlashAttention with a window over whole rows, which SDPA has no argument for. Differentiable."""
    T = q_BTHC.shape[1]
    o_BTHC = torch.ops.aten._flash_attention_forward(
        q_BTHC, k_BTKC, v_BTKC, None, None, T, T, 0.0, False, False, **_flash_masks(context)
    )[0]
    assert isinstance(o_BTHC, Tensor)
    return o_BTHC


def _flash_forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Kept]:
    """`context.prepared` holds int32 boundaries over the flattened tokens, or None for whole rows."""
    T, boundaries = q_BTHC.shape[1], context.prepared
    q, k, v = (tensor.detach() for tensor in (q_BTHC, k_BTKC, v_BTKC))
    longest = T
    if boundaries is not None:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        longest = T if context.max_seqlen is None else context.max_seqlen
    causal = context.causal and context.window is None  # a window's right end says it otherwise
    o, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, boundaries, boundaries, longest, longest, 0.0, causal, False, **_flash_masks(context)
    )
    return o.view(q_BTHC.shape), (q, k, v, o, lse, boundaries, longest, causal, state, unused)


def _flash_backward(
    kept: Kept, grad_o_BTHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, lse, boundaries, longest, causal, state, unused = kept
    gradients = torch.ops.aten._flash_attention_backward(
        grad_o_BTHC.reshape(o.shape),
        q,
        k,
        v,
        o,
        lse,
        boundaries,
        boundaries,
        longest,
        longest,
        0.0,
        causal,
        state,
        unused,
        **_flash_masks(context),
    )
    B, T = grad_o_BTHC.shape[:2]
    dq_BTHC, dk_BTKC, dv_BTKC = (gradient.view(B, T, *gradient.shape[-2:]) for gradient in gradients)
    return dq_BTHC, dk_BTKC, dv_BTKC


CUDNN = FwdBwd(_cudnn_forward, _cudnn_backward)
FLASH = FwdBwd(_flash_forward, _flash_backward)
