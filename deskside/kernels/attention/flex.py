"""FlexAttention with a block mask: windows and documents without a dense mask (Dong et al. 2024, arXiv 2412.05496).

The block mask is built outside of compiled blocks, once per forward, or once per length without documents. On a GPU,
the function that builds it is compiled, as torch recommends; in eager mode `create_block_mask` would build the dense
mask. FlexAttention has no backward on a CPU. It is fast only when compiled: inside a compiled block it is compiled with
the block, elsewhere it is compiled at first use.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from deskside.kernels.attention.context import AttentionBackend, AttentionContext, document_ids, register
from deskside.kernels.attention.sdpa import FLOAT

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> bool, as in torch


def flex(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C); `context.prepared` is the block mask."""
    function: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    o_BHTC = function(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        score_mod=None if context.softcap is None else soft_cap(context.softcap),
        block_mask=context.prepared,
        scale=context.scale,
        enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
        return_aux=None if context.sinks_H is None else AuxRequest(lse=True),
    )
    if context.sinks_H is not None:
        # A sink adds exp(sink) to the sum of exponentials, exp(lse).
        o_BHTC, aux = o_BHTC
        share_BHT = torch.sigmoid(aux.lse - context.sinks_H[:, None])
        o_BHTC = o_BHTC * share_BHT[..., None].to(o_BHTC.dtype)
    assert isinstance(o_BHTC, Tensor)
    return o_BHTC.transpose(1, 2)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=8)
def soft_cap(cap: float) -> Callable[..., Tensor]:
    """Return the function cap * tanh(score / cap); always the same one for a cap, so that it is compiled once."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def block_mask(context: AttentionContext, batch: int, tokens: int, device: torch.device) -> BlockMask:
    """Return the block mask of this context. It is cached without documents, as it then does not depend on the data."""
    if context.cu_seqlens is None:
        return _plain_block_mask(context.causal, context.window, tokens, device)
    documents_BT = document_ids(context.cu_seqlens, batch, tokens)
    return _create(document_mask_mod(documents_BT, context.causal, context.window), batch, tokens, device)


@lru_cache(maxsize=16)
def _plain_block_mask(causal: bool, window: int | None, tokens: int, device: torch.device) -> BlockMask:
    return _create(_visible_mask_mod(causal, window), None, tokens, device)


def _create(mask_mod: MaskMod, batch: int | None, tokens: int, device: torch.device) -> BlockMask:
    compiled = device.type == "cuda" and not torch.compiler.is_compiling()
    function: Any = compiled_create_block_mask() if compiled else create_block_mask
    with torch.no_grad():  # the same grad mode in training and evaluation, so that it is compiled once
        mask = function(mask_mod, batch, None, tokens, tokens, device=str(device))
    assert isinstance(mask, BlockMask)
    return mask


@lru_cache(maxsize=1)
def compiled_create_block_mask() -> Callable[..., Any]:
    """Return the compiled `create_block_mask`. It recompiles for new shapes and windows, but not for new documents."""
    return torch.compile(create_block_mask)


def document_mask_mod(documents_BT: Tensor, causal: bool, window: int | None) -> MaskMod:
    """Return the mask of causality and window, limited to pairs with the same number in `documents_BT`."""
    visible_mask_mod = _visible_mask_mod(causal, window)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible_mask_mod(b, h, q, k) & (documents_BT[b, q] == documents_BT[b, k])

    return mask_mod


def _visible_mask_mod(causal: bool, window: int | None) -> MaskMod:
    """Return the mask of causality and window."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = q >= k if causal else q == q
        return allowed if window is None else allowed & (q - k < window)

    return mask_mod


register(
    AttentionBackend(
        "flex",
        flex,
        frozenset({"cuda"}),
        FLOAT,
        window=True,
        documents=True,
        supports_noncausal=True,
        softcap=True,
        sinks=True,
        for_masks=True,
        prepare=block_mask,
    )
)
