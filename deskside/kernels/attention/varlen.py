"""torch's variable-length FlashAttention: documents of a packed batch as one ragged row (torch.nn.attention.varlen).

The boundaries come padded by empty documents at the end, so that their tensor keeps its shape under compile.
torch's module is imported where it is used: from torch 2.13 on it imports torch._dynamo, which takes seconds.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deskside.kernels.attention.aten_ops import FLASH
from deskside.kernels.attention.context import AttentionBackend, AttentionContext, FwdBwd, Kept, register
from deskside.kernels.attention.sdpa import HALF


class Ragged(NamedTuple):
    """Prepared arguments: document boundaries, and whether grouped heads have to be passed explicitly.

    This is determined outside of traced code, except with compute.compile=model, which traces `prepare`; torch then
    warns.
    """

    boundaries: Tensor
    names_groups: bool


def varlen(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C); `context.prepared` is a `Ragged`."""
    from torch.nn.attention.varlen import varlen_attn

    T = q_BTHC.shape[1]
    longest = T if context.max_seqlen is None else context.max_seqlen
    boundaries, names_groups = context.prepared
    options: dict[str, Any] = {"enable_gqa": True} if names_groups else {}
    before = -1 if context.window is None else context.window - 1
    o_NHC = varlen_attn(
        q_BTHC.flatten(0, 1),
        k_BTKC.flatten(0, 1),
        v_BTKC.flatten(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=context.scale,
        window_size=(before, 0),
        **options,
    )
    assert isinstance(o_NHC, Tensor)
    return o_NHC.view_as(q_BTHC)


@lru_cache(maxsize=1)
def _asks_for_gqa(function: Callable[..., Any]) -> bool:
    """Return whether this torch requires enable_gqa for grouped heads. Older versions accept them without it."""
    return "enable_gqa" in inspect.signature(function).parameters


def ragged(context: AttentionContext, batch: int, tokens: int, device: torch.device) -> Ragged:
    """int32 document boundaries over the flattened batch; each row is one document where there are none given."""
    from torch.nn.attention.varlen import varlen_attn

    boundaries = context.cu_seqlens
    if boundaries is None:
        boundaries = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)
    return Ragged(boundaries, _asks_for_gqa(varlen_attn))


def _forward(
    q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Kept]:
    """FlashAttention's own forward wants the boundaries alone."""
    return FLASH.forward(q_BTHC, k_BTKC, v_BTKC, replace(context, prepared=context.prepared.boundaries))


register(
    AttentionBackend(
        "varlen",
        varlen,
        frozenset({"cuda"}),
        HALF,
        window=True,
        documents=True,
        for_masks=True,
        prepare=ragged,
        pair=FwdBwd(_forward, FLASH.backward),
    )
)
