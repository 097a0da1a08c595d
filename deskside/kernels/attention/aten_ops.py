"""torch's cuDNN and FlashAttention operators, without SDPA's dispatch and (except `flash_windowed`) without autograd.

SDPA and `varlen_attn` dispatch to these ATen operators, whose signatures are the same in torch 2.11 to 2.13. cuDNN
takes (B, H, T, C), here a view of (B, T, H, C), so nothing is copied; its gradients have the strides of its inputs.
FlashAttention takes (B, T, H, C), or (N, H, C) with document boundaries. The backward operators require the random
state of dropout as arguments, although no dropout is used.
"""

from typing import Any

import torch
from torch import Tensor

from deskside.kernels.attention.context import AttentionContext, FwdBwd, Saved


def _cudnn_forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Saved]:
    q_BHTC, k_BKTC, v_BKTC = (tensor.detach().transpose(1, 2) for tensor in (q_BTHC, k_BTKC, v_BTKC))
    # After v: attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask.
    o_BHTC, lse, _, _, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BHTC, k_BKTC, v_BKTC, None, True, 0.0, context.causal, False, scale=context.scale
    )
    return o_BHTC.transpose(1, 2), (q_BHTC, k_BKTC, v_BKTC, o_BHTC, lse, seed, offset, max_q, max_k)


def _cudnn_backward(
    saved: Saved, grad_o_BTHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, max_q, max_k = saved
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


def cudnn_part(
    q_BSHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Saved]:
    """Return the output, the log-sum-exp of each query's scores, and dropout's random state (see `chunks.PartKernel`).

    The log-sum-exp is natural and in float32, (B, H, S, 1) or (B, H, S) by torch's version.
    """
    context = AttentionContext(causal=causal, scale=scale)
    o_BSHC, saved = _cudnn_forward(q_BSHC, k_BLKC, v_BLKC, context)
    lse, seed, offset = saved[4:7]
    return o_BSHC.contiguous(), lse, (seed, offset)


def cudnn_part_backward(
    grad_o_BSHC: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    o_BSHC: Tensor,
    lse: Tensor,
    random_state: Saved,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_BSHC, dk_BLKC, dv_BLKC). o_BSHC, lse: of a softmax over these keys and others.

    torch keeps cuDNN's plans by the strides of q, k and v alone, so the gradient and the output are made contiguous: a
    plan for other strides would read them wrongly.
    """
    queries, keys = inputs[0].shape[1], inputs[1].shape[1]
    q_BHSC, k_BKLC, v_BKLC = (x.detach().transpose(1, 2) for x in inputs)
    o_BHSC = o_BSHC.contiguous().transpose(1, 2)
    saved = (q_BHSC, k_BKLC, v_BKLC, o_BHSC, lse.contiguous(), *random_state, queries, keys)
    return _cudnn_backward(saved, grad_o_BSHC.contiguous(), AttentionContext(causal=causal, scale=scale))


def flash_keywords(context: AttentionContext) -> dict[str, Any]:
    """Return the keyword arguments for scale and window.

    FlashAttention's sizes count the keys before and after a query, None for all; `context.window` includes the query.
    """
    if context.window is None:
        return {"scale": context.scale}
    after = 0 if context.causal else None
    return {"scale": context.scale, "window_size_left": context.window - 1, "window_size_right": after}


def flash_windowed(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """Run FlashAttention, differentiable, with a window and without documents. SDPA has no window argument."""
    T = q_BTHC.shape[1]
    # After v: cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask.
    o_BTHC = torch.ops.aten._flash_attention_forward(
        q_BTHC, k_BTKC, v_BTKC, None, None, T, T, 0.0, False, False, **flash_keywords(context)
    )[0]
    assert isinstance(o_BTHC, Tensor)
    return o_BTHC


def _flash_forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Saved]:
    """Run the forward without autograd. `context.prepared` is `context.cu_seqlens`, or None without documents."""
    T, cu_seqlens = q_BTHC.shape[1], context.prepared
    q, k, v = (tensor.detach() for tensor in (q_BTHC, k_BTKC, v_BTKC))
    max_seqlen = T
    if cu_seqlens is not None:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        max_seqlen = T if context.max_seqlen is None else context.max_seqlen
    # With a window, window_size_right = 0 masks the future.
    causal = context.causal and context.window is None
    o, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        causal,
        False,
        **flash_keywords(context),
    )
    return o.view(q_BTHC.shape), (q, k, v, o, lse, cu_seqlens, max_seqlen, causal, rng_state, unused)


def _flash_backward(
    saved: Saved, grad_o_BTHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, lse, cu_seqlens, max_seqlen, causal, rng_state, unused = saved
    gradients = torch.ops.aten._flash_attention_backward(
        grad_o_BTHC.reshape(o.shape),
        q,
        k,
        v,
        o,
        lse,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        0.0,
        causal,
        rng_state,
        unused,
        **flash_keywords(context),
    )
    B, T = grad_o_BTHC.shape[:2]
    dq_BTHC, dk_BTKC, dv_BTKC = (gradient.view(B, T, *gradient.shape[-2:]) for gradient in gradients)
    return dq_BTHC, dk_BTKC, dv_BTKC


CUDNN = FwdBwd(_cudnn_forward, _cudnn_backward)
FLASH = FwdBwd(_flash_forward, _flash_backward)
