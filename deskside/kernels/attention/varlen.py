"""torch's variable-length FlashAttention (torch.nn.attention.varlen), for the documents of a packed batch.

`cu_seqlens` ends with empty documents as padding, so that its shape is constant under torch.compile. torch's module is
imported inside the functions, because from torch 2.13 on it imports torch._dynamo, which takes seconds.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deskside.kernels.attention.aten_ops import FLASH
from deskside.kernels.attention.context import AttentionBackend, AttentionContext, FwdBwd, Saved, register
from deskside.kernels.attention.sdpa import HALF


class VarlenArguments(NamedTuple):
    """Prepared arguments: document boundaries, and True if this torch version needs enable_gqa for grouped heads.

    The signature is inspected outside of traced code, except with compute.compile=model, which traces `prepare` and
    makes torch warn.
    """

    cu_seqlens: Tensor
    needs_enable_gqa: bool


def varlen(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C); `context.prepared` is a `VarlenArguments`."""
    from torch.nn.attention.varlen import varlen_attn

    T = q_BTHC.shape[1]
    max_seqlen = T if context.max_seqlen is None else context.max_seqlen
    cu_seqlens, needs_enable_gqa = context.prepared
    options: dict[str, Any] = {"enable_gqa": True} if needs_enable_gqa else {}
    left = -1 if context.window is None else context.window - 1
    o_NHC = varlen_attn(
        q_BTHC.flatten(0, 1),
        k_BTKC.flatten(0, 1),
        v_BTKC.flatten(0, 1),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=context.scale,
        window_size=(left, 0),
        **options,
    )
    assert isinstance(o_NHC, Tensor)
    return o_NHC.view_as(q_BTHC)


@lru_cache(maxsize=1)
def _needs_enable_gqa(function: Callable[..., Any]) -> bool:
    """Return True if this torch version needs enable_gqa for grouped heads. Older versions do not have the argument."""
    return "enable_gqa" in inspect.signature(function).parameters


def varlen_arguments(
    context: AttentionContext, batch: int, tokens: int, device: torch.device
) -> VarlenArguments:
    """Return the arguments for `varlen`: the boundaries of `context`, or one document per row if it has none."""
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = context.cu_seqlens
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)
    return VarlenArguments(cu_seqlens, _needs_enable_gqa(varlen_attn))


def _forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Saved]:
    """Run FlashAttention's forward, whose `prepared` is only the boundaries."""
    return FLASH.forward(q_BTHC, k_BTKC, v_BTKC, replace(context, prepared=context.prepared.cu_seqlens))


register(
    AttentionBackend(
        "varlen",
        varlen,
        frozenset({"cuda"}),
        HALF,
        window=True,
        documents=True,
        for_masks=True,
        prepare=varlen_arguments,
        pair=FwdBwd(_forward, FLASH.backward),
    )
)
