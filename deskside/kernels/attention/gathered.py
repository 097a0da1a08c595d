"""Attention over rows that processes share (context parallelism): every process gathers all keys and values.

The queries of a process are two chunks of a row (see ranks.py). Chunk start:stop attends to keys 0:stop, so that each
chunk is ordinary causal attention whose queries are the last ones of its keys, also with a window or with documents.
Keys and values are gathered as in Llama 3 (arXiv 2407.21783, section 3.3.2) and not passed around in a ring with merged
softmaxes (arXiv 2310.01889): for two processes the bytes sent are the same, documents need no special case, and each
softmax is computed in one piece, so that the result equals a single process's up to the order of sums. With
grouped-query attention, the gathered keys and values are small beside the other activations. The backward gathers them
again instead of keeping them. The gradients of keys and values are summed over the processes, and each process gets
those of its own tokens.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deskside.kernels.attention.aten_ops import flash_keywords
from deskside.kernels.attention.choose import TOLERANCE, worst_error
from deskside.kernels.attention.context import (
    AttentionBackend,
    AttentionContext,
    FwdBwd,
    Requirements,
    Saved,
    document_ids,
    register,
)
from deskside.kernels.attention.ranks import ContextRanks
from deskside.kernels.attention.reference import QUERY_CHUNK, allowed_keys, attend
from deskside.kernels.attention.sdpa import FLOAT, HALF
from deskside.kernels.functional import gradients
from deskside.utils.errors import RunError


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


def uses_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if chunks run in FlashAttention, and not in plain torch."""
    return device.type == "cuda" and dtype in HALF


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
    inputs: tuple[Tensor, Tensor, Tensor],
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


def _forward(
    q_BLHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Saved]:
    """Run the forward without autograd. The inputs and the output are this process's tokens."""
    q_BLHC, k_BLKC, v_BLKC = q_BLHC.detach(), k_BLKC.detach(), v_BLKC.detach()
    k_BTKC, v_BTKC = _gather(k_BLKC, v_BLKC, context)
    outputs, saved_chunks = [], []
    with torch.no_grad():
        for q_BSHC, chunk in zip(q_BLHC.chunk(2, dim=1), context.prepared.chunks, strict=True):
            saved: Saved = ()
            if uses_flash(q_BLHC.device, q_BLHC.dtype):
                o_BSHC, saved = flash_chunk(q_BSHC, k_BTKC, v_BTKC, chunk, context)
            else:
                o_BSHC = chunk_reference(q_BSHC, k_BTKC, v_BTKC, chunk, context)
            outputs.append(o_BSHC)
            saved_chunks.append(saved)
    return torch.cat(outputs, dim=1), (q_BLHC, k_BLKC, v_BLKC, saved_chunks)


def _backward(saved: Saved, grad_o_BLHC: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
    q_BLHC, k_BLKC, v_BLKC, saved_chunks = saved
    k_BTKC, v_BTKC = _gather(k_BLKC, v_BLKC, context)
    dk_BTKC, dv_BTKC = torch.zeros_like(k_BTKC), torch.zeros_like(v_BTKC)
    queries, grads = q_BLHC.chunk(2, dim=1), grad_o_BLHC.chunk(2, dim=1)
    dq = []
    for q_BSHC, grad_BSHC, state, chunk in zip(
        queries, grads, saved_chunks, context.prepared.chunks, strict=True
    ):
        inputs = (q_BSHC, k_BTKC, v_BTKC)
        if uses_flash(q_BLHC.device, q_BLHC.dtype):
            dq_BSHC, dk, dv = flash_chunk_backward(grad_BSHC, inputs, state, chunk, context)
        else:
            q, k, v = (x.detach().requires_grad_() for x in inputs)
            with torch.enable_grad():
                o_BSHC = chunk_reference(q, k, v, chunk, context)
            dq_BSHC, dk, dv = torch.autograd.grad(o_BSHC, (q, k, v), grad_BSHC)
        dq.append(dq_BSHC)
        dk_BTKC[:, : dk.shape[1]] += dk
        dv_BTKC[:, : dv.shape[1]] += dv
    both = context.ranks.sum_parts(torch.cat((dk_BTKC, dv_BTKC), dim=2))  # type: ignore[union-attr]
    dk_BLKC, dv_BLKC = both.chunk(2, dim=2)
    return torch.cat(dq, dim=1), dk_BLKC, dv_BLKC


def _gather(k_BLKC: Tensor, v_BLKC: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
    """Return keys and values of the whole rows, exchanged in one message."""
    assert context.ranks is not None  # checked by `prepare_chunks`
    k_BTKC, v_BTKC = context.ranks.gather(torch.cat((k_BLKC, v_BLKC), dim=2)).chunk(2, dim=2)
    return k_BTKC, v_BTKC


def check_chunks(need: Requirements, size: int) -> None:
    """Run the chunks of `size` processes on this device, and compare them with plain torch in float32.

    need: the attention problem of a row, of which a short one is checked. Raises RunError if a chunk is wrong.
    """
    tokens, generator = 256 * size, torch.Generator(need.device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        shape = (2, tokens, heads, need.head_dim)
        return torch.randn(shape, generator=generator, device=need.device).to(need.dtype)

    q, k, v, grad = (normal(heads) for heads in (need.heads, need.kv_heads, need.kv_heads, need.heads))
    cu_seqlens = None
    if need.documents:
        # The first ends within a chunk, the second where a chunk ends, the third is the rest of the row.
        ends = [row * tokens + end for row in range(2) for end in (0, 77, tokens // 2)]
        cu_seqlens = torch.tensor([*ends, 2 * tokens], dtype=torch.int32, device=need.device)
    for rank in range(size):
        ranks = ContextRanks(None, rank, size)
        context = AttentionContext(cu_seqlens=cu_seqlens, window=need.window, backend="gathered", ranks=ranks)
        prepared = prepare_chunks(context, 2, tokens // size, need.device)
        context = replace(context, prepared=prepared)
        for chunk in prepared.chunks:
            part = slice(chunk.start, chunk.stop)
            inputs = (q[:, part], k, v)
            o, saved = flash_chunk(*inputs, chunk, context)
            found = [o, *flash_chunk_backward(grad[:, part], inputs, saved, chunk, context)]
            leaves = [x[:, : chunk.stop].float().requires_grad_() for x in inputs]
            o = chunk_reference(leaves[0], leaves[1], leaves[2], chunk, context)
            error = worst_error(found, [o.detach(), *gradients([o], leaves, [grad[:, part].float()])])
            if not error <= TOLERANCE[need.dtype]:
                raise RunError(
                    f"parallel.context: FlashAttention of this torch computes chunks of a row wrongly here (relative "
                    f"error {error:.1e}); leave parallel.context out"
                )


PAIR = FwdBwd(_forward, _backward)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BLHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, context: AttentionContext
    ) -> Tensor:
        o_BLHC, (q, k, v, saved_chunks) = PAIR.forward(q_BLHC, k_BLKC, v_BLKC, context)
        ctx.save_for_backward(q, k, v, *(x for saved in saved_chunks for x in saved))
        ctx.context = context
        return o_BLHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        half = len(rest) // 2
        saved = (q, k, v, [tuple(rest[:half]), tuple(rest[half:])])
        return *PAIR.backward(saved, grads[0], ctx.context), None


def gathered(q_BLHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, context: AttentionContext) -> Tensor:
    """(B, L, H, C), (B, L, K, C), (B, L, K, C) -> (B, L, H, C), L = T / c tokens of this process; differentiable."""
    o_BLHC: Tensor = _Gathered.apply(q_BLHC, k_BLKC, v_BLKC, context)
    return o_BLHC


register(
    AttentionBackend(
        "gathered",
        gathered,
        frozenset({"cpu", "cuda"}),
        FLOAT | {torch.float64},
        window=True,
        documents=True,
        shared_rows=True,
        prepare=prepare_chunks,
        pair=PAIR,
    )
)
