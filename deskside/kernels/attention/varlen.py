"""torch's variable-length FlashAttention: documents of a packed batch as one ragged row (torch.nn.attention.varlen).

The boundaries come padded by empty documents at the end, so that their tensor keeps its shape under compile.
"""

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from deskside.kernels.attention.context import AttentionContext, Backend, register
from deskside.kernels.attention.direct import FLASH
from deskside.kernels.attention.sdpa import HALF


def varlen(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C); `context.prepared` holds the boundaries."""
    T = q_BTHC.shape[1]
    longest = T if context.max_seqlen is None else context.max_seqlen
    options: dict[str, Any] = {"enable_gqa": True} if _asks_for_gqa() else {}
    before = -1 if context.window is None else context.window - 1
    o_NHC = varlen_attn(
        q_BTHC.flatten(0, 1),
        k_BTKC.flatten(0, 1),
        v_BTKC.flatten(0, 1),
        context.prepared,
        context.prepared,
        longest,
        longest,
        scale=context.scale,
        window_size=(before, 0),
        **options,
    )
    assert isinstance(o_NHC, Tensor)
    return o_NHC.view_as(q_BTHC)


@lru_cache(maxsize=1)
def _asks_for_gqa() -> bool:
    """Newer torch wants grouped heads to be named; before, the kernel took them as they came."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def boundaries(context: AttentionContext, batch: int, tokens: int, device: torch.device) -> Tensor:
    """int32 document boundaries over the flattened batch; each row is one document where there are none given."""
    if context.cu_seqlens is not None:
        return context.cu_seqlens
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)


register(
    Backend(
        "varlen",
        varlen,
        frozenset({"cuda"}),
        HALF,
        window=True,
        documents=True,
        for_masks=True,
        prepare=boundaries,
        pair=FLASH,
    )
)
