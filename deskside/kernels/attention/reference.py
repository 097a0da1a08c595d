"""Attention in plain torch: the reference for all other backends, and attention over a gathered key-value cache.

Queries are processed in chunks, so that no T x T mask or score matrix exists, and `reference` reads only the keys that
a chunk can see. Scores and softmax are in float32 (float64 for float64 inputs).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deskside.kernels.attention.context import (
    PLAIN,
    AttentionBackend,
    AttentionContext,
    document_ids,
    register,
)
from deskside.kernels.functional import at_least_float32

QUERY_CHUNK = 256


def reference(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, T, H, C), (B, T, K, C), (B, T, K, C) -> (B, T, H, C)."""
    B, T, _, C = q_BTHC.shape
    scale = C**-0.5 if context.scale is None else context.scale
    position = torch.arange(T, device=q_BTHC.device)
    documents = None if context.cu_seqlens is None else document_ids(context.cu_seqlens, B, T)
    chunks = []
    for start in range(0, T, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, T)
        first_key, end_key = visible_keys(start, stop, T, context)
        allowed_BTL = allowed_keys(position[None, start:stop], position[None, first_key:end_key], context)
        if documents is not None:
            same_document = documents[:, start:stop, None] == documents[:, None, first_key:end_key]
            allowed_BTL = same_document if allowed_BTL is None else same_document & allowed_BTL
        chunks.append(
            attend(
                q_BTHC[:, start:stop],
                k_BTKC[:, first_key:end_key],
                v_BTKC[:, first_key:end_key],
                allowed_BTL,
                scale,
                context.softcap,
                context.sinks_H,
            )
        )
    return torch.cat(chunks, dim=1)


def is_plain(options: AttentionContext) -> bool:
    """Return True if attention is a softmax of the scaled scores, with no soft cap and no sinks."""
    return options.softcap is None and options.sinks_H is None


def visible_keys(start: int, stop: int, tokens: int, context: AttentionContext) -> tuple[int, int]:
    """Return the range of keys that some of the queries start:stop can see."""
    first = 0 if context.window is None else max(0, start - context.window + 1)
    return first, (stop if context.causal else tokens)


def allowed_keys(query_BT: Tensor, key_BL: Tensor, context: AttentionContext) -> Tensor | None:
    """Return the mask (B, T, L) bool from the positions of queries and keys, or None if everything is allowed."""
    query_BT1, key_B1L = query_BT[:, :, None], key_BL[:, None]
    allowed = key_B1L <= query_BT1 if context.causal else None
    if context.window is not None:
        near = key_B1L > query_BT1 - context.window
        allowed = near if allowed is None else allowed & near
    return allowed


def attend(
    q_BTHC: Tensor,
    k_BLKC: Tensor,
    v_BLKC: Tensor,
    allowed_BTL: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Softmax attention of T queries over L keys, H / K query heads to each key head. Returns (B, T, H, C).

    softcap, sinks_H: see `AttentionContext`.
    """
    B, T, H, C = q_BTHC.shape
    K = k_BLKC.shape[2]
    dtype = at_least_float32(q_BTHC)
    q_BKGTC = q_BTHC.unflatten(2, (K, H // K)).permute(0, 2, 3, 1, 4).to(dtype)
    k_BK1LC = k_BLKC.transpose(1, 2).unsqueeze(2).to(dtype)
    v_BK1LC = v_BLKC.transpose(1, 2).unsqueeze(2).to(dtype)
    scores = q_BKGTC @ k_BK1LC.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if allowed_BTL is not None:
        scores = scores.masked_fill(~allowed_BTL[:, None, None], -math.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(dtype).view(1, K, H // K, 1, 1).expand(B, -1, -1, T, -1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    o_BKGTC = weights @ v_BK1LC
    return o_BKGTC.permute(0, 3, 1, 2, 4).reshape(B, T, H, C).to(q_BTHC.dtype)


def decode_attention(
    q_BTHC: Tensor,
    cache_k_BLKC: Tensor,
    cache_v_BLKC: Tensor,
    positions_BT: Tensor,
    options: AttentionContext = PLAIN,
    attend: Callable[..., Tensor] = attend,
) -> Tensor:
    """Attend from new tokens to a key-value cache that already contains them. Returns (B, T, H, C).

    positions_BT: int64, the position of each query in its row. Cache entry l is position l, and a query sees entries
    0..position, or the last `window` of them. options: window, scale, softcap and sinks. attend: the function for a
    chunk of queries, like `attend` above.
    """
    T, L = q_BTHC.shape[1], cache_k_BLKC.shape[1]
    key_1L = torch.arange(L, device=q_BTHC.device)[None]
    scale = q_BTHC.shape[-1] ** -0.5 if options.scale is None else options.scale
    scoring = (scale,) if is_plain(options) else (scale, options.softcap, options.sinks_H)
    chunks = []
    for start in range(0, T, QUERY_CHUNK):
        part = slice(start, start + QUERY_CHUNK)
        allowed_BTL = allowed_keys(positions_BT[:, part], key_1L, options)
        chunks.append(attend(q_BTHC[:, part], cache_k_BLKC, cache_v_BLKC, allowed_BTL, *scoring))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)


register(
    AttentionBackend(
        name="reference",
        function=reference,
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        window=True,
        documents=True,
        supports_noncausal=True,
        softcap=True,
        sinks=True,
        max_head_dim=4096,
    )
)
