"""FlexAttention with a block mask: windows and documents without a dense mask (Dong et al. 2024, arXiv 2412.05496).

The block mask is built outside of the compiled block, once per forward (once per shape where there are no documents).
On a GPU that is compiled, as torch advises: run eagerly, `create_block_mask` makes the dense mask first.
FlexAttention has no backward on a CPU. It is fast only when compiled: inside a compiled block it is part of it,
elsewhere it is compiled on first use.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from deskside.kernels.attention.context import AttentionBackend, AttentionContext, document_ids, register
from deskside.kernels.attention.sdpa import FLOAT

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # a mask of batch, head, query, key


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
    return _create(documents_rule(documents_BT, context.causal, context.window), batch, tokens, device)


@lru_cache(maxsize=16)
def _plain_block_mask(causal: bool, window: int | None, tokens: int, device: torch.device) -> BlockMask:
    return _create(_visible(causal, window), None, tokens, device)


def _create(rule: Rule, batch: int | None, tokens: int, device: torch.device) -> BlockMask:
    compiled = device.type == "cuda" and not torch.compiler.is_compiling()
    function: Any = compiled_create_block_mask() if compiled else create_block_mask
    with torch.no_grad():  # so that training and evaluation share what is compiled
        mask = function(rule, batch, None, tokens, tokens, device=str(device))
    assert isinstance(mask, BlockMask)
    return mask


@lru_cache(maxsize=1)
def compiled_create_block_mask() -> Callable[..., Any]:
    """Compiled again for other shapes and windows, but not for other documents."""
    return torch.compile(create_block_mask)


def documents_rule(documents_BT: Tensor, causal: bool, window: int | None) -> Rule:
    """Positions see each other where they also have the same number in `documents_BT`."""
    visible = _visible(causal, window)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(b, h, q, k) & (documents_BT[b, q] == documents_BT[b, k])

    return rule


def _visible(causal: bool, window: int | None) -> Rule:
    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = q >= k if causal else q == q
        return allowed if window is None else allowed & (q - k < window)

    return rule


register(
    AttentionBackend(
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
