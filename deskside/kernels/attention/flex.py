"""FlexAttention with a block mask: windows and documents without a dense mask (Dong et al. 2024, arXiv 2412.05496).

The block mask is built outside of the compiled block, once per forward (once per shape where there are no documents).
It has no backward on a CPU. It is fast only when compiled: inside a compiled block it is part of it, elsewhere it is
compiled on first use.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from deskside.kernels.attention.context import AttentionContext, Backend, document_ids, register
from deskside.kernels.attention.sdpa import FLOAT


def flex(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C); `context.prepared` is the block mask."""
    function: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    o_BHTC = function(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        block_mask=context.prepared,
        scale=context.scale,
        enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
    )
    assert isinstance(o_BHTC, Tensor)
    return o_BHTC.transpose(1, 2)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def block_mask(context: AttentionContext, batch: int, tokens: int, device: torch.device) -> BlockMask:
    """The block mask of this context. Without documents it is kept, since it depends on the shape alone."""
    if context.cu_seqlens is None:
        return _plain_block_mask(context.causal, context.window, tokens, device)
    documents_BT = document_ids(context.cu_seqlens, batch, tokens)
    visible = _visible(context.causal, context.window)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(b, h, q, k) & (documents_BT[b, q] == documents_BT[b, k])

    return create_block_mask(rule, batch, None, tokens, tokens, device=str(device))


@lru_cache(maxsize=16)
def _plain_block_mask(causal: bool, window: int | None, tokens: int, device: torch.device) -> BlockMask:
    return create_block_mask(_visible(causal, window), None, None, tokens, tokens, device=str(device))


def _visible(causal: bool, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = q >= k if causal else q == q
        return allowed if window is None else allowed & (q - k < window)

    return rule


register(
    Backend(
        "flex",
        flex,
        frozenset({"cuda"}),
        FLOAT,
        window=True,
        documents=True,
        not_causal=True,
        for_masks=True,
        prepare=block_mask,
    )
)
