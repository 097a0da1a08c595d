"""Attention of a chunk of a row whose other chunks are on other processes (context parallelism), in three kernels.

The queries of chunk start:stop see keys 0:stop, which is ordinary causal attention whose queries are the last ones of
its keys, also with a window or with documents. FlashAttention computes this in one call, as does plain torch. cuDNN
aligns the first query with the first key, so it computes two parts that need no such alignment: a causal square, of the
chunk's queries and its own keys, and a rectangle without a mask, of the same queries and all earlier keys. Each part is
a softmax of its own. Their outputs are merged by the log-sum-exps of their scores, and the backward of a part takes the
merged output and log-sum-exp, as in ring attention (Liu et al., arXiv 2310.01889, and FlashAttention's backward, arXiv
2205.14135, algorithm 4): the probabilities are exp(score - log-sum-exp) of the whole softmax. So cuDNN's kernels do the
same FLOPs as for a whole row, but have neither windows nor documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deskside.kernels.attention.aten_ops import cudnn_part, cudnn_part_backward, flash_keywords
from deskside.kernels.attention.context import AttentionContext, Saved, document_ids
from deskside.kernels.attention.reference import QUERY_CHUNK, allowed_keys, attend
from deskside.kernels.functional import at_least_float32


class Chunk(NamedTuple):
    """A chunk start:stop of every row, whose queries see keys 0:stop.

    cu_q, cu_k: int32, the boundaries of the documents over the flattened B * (stop - start) queries and B * stop keys.
    """

    start: int
    stop: int
    cu_q: Tensor
    cu_k: Tensor


class Prepared(NamedTuple):
    """The two chunks of this process, and each token's document in the whole rows, (B, T); None without documents."""

    chunks: tuple[Chunk, ...]
    documents_BT: Tensor | None


# q_BSHC, k_BTKC, v_BTKC: queries of a chunk, keys and values of whole rows
Inputs = tuple[Tensor, Tensor, Tensor]


class ChunkKernel(NamedTuple):
    """Attention of one chunk, S = stop - start, as plain functions.

    forward: (q_BSHC, k_BTKC, v_BTKC, chunk, context) -> (o_BSHC, tensors for the backward besides the inputs).
    backward: (grad_o_BSHC, the inputs, these tensors, chunk, context) -> (dq_BSHC, dk, dv), the last two of keys and
        values 0:stop.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Chunk, AttentionContext], tuple[Tensor, Saved]]
    backward: Callable[[Tensor, Inputs, Saved, Chunk, AttentionContext], tuple[Tensor, Tensor, Tensor]]


def prepare_chunks(context: AttentionContext, batch: int, tokens: int, device: torch.device) -> Prepared:
    """Return what every layer needs. tokens: of this process."""
    assert context.ranks is not None  # checked by `AttentionBackend.unsupported_reason`
    T = tokens * context.ranks.size
    cu, documents_BT = context.cu_seqlens, None
    if cu is None:
        cu = torch.arange(0, (batch + 1) * T, T, dtype=torch.int32, device=device)
    else:
        documents_BT = document_ids(cu, batch, T)
    row, offset = cu // T, cu % T
    chunks = []
    for start, stop in context.ranks.chunks(T):
        # In a chunk, a document that ends before it has keys but no queries, and one that begins after it has neither.
        cu_q = row * (stop - start) + offset.clamp(start, stop) - start
        cu_k = row * stop + offset.clamp(max=stop)
        chunks.append(Chunk(start, stop, cu_q.to(torch.int32), cu_k.to(torch.int32)))
    return Prepared(tuple(chunks), documents_BT)


def chunk_reference(
    q_BSHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, chunk: Chunk, context: AttentionContext
) -> Tensor:
    """Return the output (B, stop - start, H, C) of one chunk in plain torch. k_BTKC, v_BTKC: of the whole rows."""
    documents_BT = context.prepared.documents_BT
    scale = q_BSHC.shape[-1] ** -0.5 if context.scale is None else context.scale
    position = torch.arange(chunk.stop, device=q_BSHC.device)[None]
    outputs = []
    for first in range(chunk.start, chunk.stop, QUERY_CHUNK):
        last = min(first + QUERY_CHUNK, chunk.stop)
        allowed_BTL = allowed_keys(position[:, first:last], position[:, :last], context)
        if documents_BT is not None:
            allowed_BTL = allowed_BTL & (documents_BT[:, first:last, None] == documents_BT[:, None, :last])
        q = q_BSHC[:, first - chunk.start : last - chunk.start]
        outputs.append(attend(q, k_BTKC[:, :last], v_BTKC[:, :last], allowed_BTL, scale))
    return torch.cat(outputs, dim=1)


def plain_chunk(
    q_BSHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, chunk: Chunk, context: AttentionContext
) -> tuple[Tensor, Saved]:
    """Return the output of one chunk in plain torch; the backward computes it again."""
    return chunk_reference(q_BSHC, k_BTKC, v_BTKC, chunk, context), ()


def plain_chunk_backward(
    grad_o_BSHC: Tensor, inputs: Inputs, saved: Saved, chunk: Chunk, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as `flash_chunk_backward` does."""
    q_BSHC, k_BTKC, v_BTKC = inputs
    q, k, v = (
        x.detach().requires_grad_() for x in (q_BSHC, k_BTKC[:, : chunk.stop], v_BTKC[:, : chunk.stop])
    )
    with torch.enable_grad():
        o_BSHC = chunk_reference(q, k, v, chunk, context)
    dq_BSHC, dk, dv = torch.autograd.grad(o_BSHC, (q, k, v), grad_o_BSHC)
    return dq_BSHC, dk, dv


def flash_chunk(
    q_BSHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, chunk: Chunk, context: AttentionContext
) -> tuple[Tensor, Saved]:
    """Return the output of one chunk by FlashAttention, and what its backward needs besides the keys and values.

    FlashAttention aligns the last query of a document with its last key, which is what a chunk needs.
    """
    q = q_BSHC.flatten(0, 1)
    k, v = (x[:, : chunk.stop].flatten(0, 1) for x in (k_BTKC, v_BTKC))
    causal = context.window is None  # with a window, window_size_right = 0 masks the future
    o, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        chunk.cu_q,
        chunk.cu_k,
        chunk.stop - chunk.start,
        chunk.stop,
        0.0,
        causal,
        False,
        **flash_keywords(context),
    )
    return o.view(q_BSHC.shape), (o, lse, rng_state, unused)


def flash_chunk_backward(
    grad_o_BSHC: Tensor,
    inputs: Inputs,
    saved: Saved,
    chunk: Chunk,
    context: AttentionContext,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq_BSHC, dk, dv), the last two of keys and values 0:stop. inputs: as in `flash_chunk`."""
    o, lse, rng_state, unused = saved
    q_BSHC, k_BTKC, v_BTKC = inputs
    k_BTKC, v_BTKC = k_BTKC[:, : chunk.stop], v_BTKC[:, : chunk.stop]
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_o_BSHC.reshape(o.shape),
        q_BSHC.flatten(0, 1),
        k_BTKC.flatten(0, 1),
        v_BTKC.flatten(0, 1),
        o,
        lse,
        chunk.cu_q,
        chunk.cu_k,
        chunk.stop - chunk.start,
        chunk.stop,
        0.0,
        context.window is None,
        rng_state,
        unused,
        **flash_keywords(context),
    )
    return dq.view(q_BSHC.shape), dk.view(k_BTKC.shape), dv.view(v_BTKC.shape)


class PartKernel(NamedTuple):
    """Attention of S queries to L keys, which may be a part of the keys of a whole softmax, as plain functions.

    forward: (q_BSHC, k_BLKC, v_BLKC, causal, scale) -> (o_BSHC, lse, other tensors for the backward). lse: the
        logarithm of each query's sum of exponentials, (B, H, S) or (B, H, S, 1), in float32 or wider. causal: S = L,
        and a query sees no later key.
    backward: (grad_o_BSHC, the inputs, o_BSHC, lse, the other tensors, causal, scale) -> (dq_BSHC, dk_BLKC, dv_BLKC),
        the gradients through these keys, where o_BSHC and lse are those of the whole softmax.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, float | None], tuple[Tensor, Tensor, Saved]]
    backward: Callable[
        [Tensor, Inputs, Tensor, Tensor, Saved, bool, float | None], tuple[Tensor, Tensor, Tensor]
    ]


@dataclass(frozen=True)
class MergedParts:
    """Attention of a chunk as a causal square and a rectangle, each by `part`, without windows and documents."""

    part: PartKernel

    def forward(
        self, q_BSHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, chunk: Chunk, context: AttentionContext
    ) -> tuple[Tensor, Saved]:
        """See `ChunkKernel`."""
        (k_own, v_own), (k_earlier, v_earlier) = _own_and_earlier(k_BTKC, v_BTKC, chunk)
        o_BSHC, lse, rest = self.part.forward(q_BSHC, k_own, v_own, True, context.scale)
        if chunk.start:
            other = self.part.forward(q_BSHC, k_earlier, v_earlier, False, context.scale)
            o_BSHC, lse = merge(o_BSHC, lse, other[0], other[1])
        return o_BSHC, (o_BSHC, lse, *rest)

    def backward(
        self, grad_o_BSHC: Tensor, inputs: Inputs, saved: Saved, chunk: Chunk, context: AttentionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `ChunkKernel`."""
        q_BSHC, k_BTKC, v_BTKC = inputs
        o_BSHC, lse, *rest = saved
        own, earlier = _own_and_earlier(k_BTKC, v_BTKC, chunk)
        whole = (o_BSHC, lse, tuple(rest))
        dq, dk, dv = self.part.backward(grad_o_BSHC, (q_BSHC, *own), *whole, True, context.scale)
        if chunk.start:
            more = self.part.backward(grad_o_BSHC, (q_BSHC, *earlier), *whole, False, context.scale)
            # One addition of two 16-bit numbers rounds once, as one in float32 and a conversion would.
            dq, dk, dv = dq + more[0], torch.cat((more[1], dk), dim=1), torch.cat((more[2], dv), dim=1)
        return dq, dk, dv


def _own_and_earlier(
    k_BTKC: Tensor, v_BTKC: Tensor, chunk: Chunk
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return keys and values of the chunk itself, and those before it."""
    own = k_BTKC[:, chunk.start : chunk.stop], v_BTKC[:, chunk.start : chunk.stop]
    return own, (k_BTKC[:, : chunk.start], v_BTKC[:, : chunk.start])


def merge(o_BSHC: Tensor, lse: Tensor, other_o_BSHC: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the softmax over the keys of both parts, computed in float32 or wider.

    lse, other_lse: (B, H, S) or (B, H, S, 1), like that of the result.
    """
    B, S, H, _ = o_BSHC.shape
    other_share_BSH1 = torch.sigmoid(other_lse - lse).reshape(B, H, S, 1).transpose(1, 2)
    dtype = at_least_float32(o_BSHC)
    wide_BSHC = o_BSHC.to(dtype, copy=True).lerp_(other_o_BSHC.to(dtype), other_share_BSH1.to(dtype))
    return wide_BSHC.to(o_BSHC.dtype), torch.logaddexp(lse, other_lse)


PLAIN_CHUNKS = ChunkKernel(plain_chunk, plain_chunk_backward)
FLASH_CHUNKS = ChunkKernel(flash_chunk, flash_chunk_backward)
_CUDNN = MergedParts(PartKernel(cudnn_part, cudnn_part_backward))
CUDNN_CHUNKS = ChunkKernel(_CUDNN.forward, _CUDNN.backward)
