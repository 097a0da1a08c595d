"""Attention over rows that processes share (context parallelism): every process gathers all keys and values.

The queries of a process are two chunks of a row (see ranks.py). Chunk start:stop attends to keys 0:stop, so that each
chunk is ordinary causal attention whose queries are the last ones of its keys; chunks.py has the kernels, and each is a
backend: `gathered` in plain torch, `gathered-flash` and `gathered-cudnn`. `backend_for` says which one a run uses.
Keys and values are gathered as in Llama 3 (arXiv 2407.21783, section 3.3.2) and not passed around in a ring (arXiv
2310.01889): for two processes the bytes sent are the same, and documents need no special case. With grouped-query
attention, the gathered keys and values are small beside the other activations. The backward gathers them again instead
of keeping them. The gradients of keys and values are summed over the processes, and each process gets those of its own
tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deskside.kernels.attention.choose import TOLERANCE, worst_error
from deskside.kernels.attention.chunks import (
    CUDNN_CHUNKS,
    FLASH_CHUNKS,
    PLAIN_CHUNKS,
    ChunkKernel,
    chunk_reference,
    prepare_chunks,
)
from deskside.kernels.attention.context import (
    AttentionBackend,
    AttentionContext,
    FwdBwd,
    Requirements,
    Saved,
    backend_named,
    register,
)
from deskside.kernels.attention.ranks import ContextRanks
from deskside.kernels.attention.sdpa import FLOAT, HALF
from deskside.kernels.functional import gradients
from deskside.utils.errors import RunError, first_line

KERNELS: dict[str, ChunkKernel] = {
    "gathered": PLAIN_CHUNKS,
    "gathered-flash": FLASH_CHUNKS,
    "gathered-cudnn": CUDNN_CHUNKS,
}
LIBRARIES = {"gathered": "plain torch", "gathered-flash": "torch's FlashAttention", "gathered-cudnn": "cuDNN"}
# By backend, the value of compute.attention that selects another kernel for the chunks, if there is one.
OTHERS = {"gathered-cudnn": "flash"}


def backend_for(need: Requirements, seconds: Mapping[str, float]) -> str:
    """Return the name of the backend with which processes share the rows of this problem.

    It is cuDNN's if the trial of whole rows found cuDNN to be correct and faster than torch's FlashAttention, or has no
    time of the latter, as when the run asked for cuDNN. A trial with a window, with documents or with deterministic
    kernels has no result for cuDNN. Otherwise it is FlashAttention's, and plain torch's on a CPU or in float32.

    need: the problem of whole rows. seconds: the trial's, by backend (`BackendChoice.seconds`); empty if there is none.
    """
    shared = replace(need, shared_rows=True)

    def supported(name: str) -> bool:
        return backend_named(name).unsupported_reason(shared) is None

    is_faster = seconds.get("cudnn", math.inf) < seconds.get("flash", math.inf)
    if is_faster and supported("gathered-cudnn"):
        return "gathered-cudnn"
    return "gathered-flash" if supported("gathered-flash") else "gathered"


def _forward(
    kernel: str, q_BLHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, context: AttentionContext
) -> tuple[Tensor, Saved]:
    """Run the forward without autograd. The inputs and the output are this process's tokens."""
    q_BLHC, k_BLKC, v_BLKC = q_BLHC.detach(), k_BLKC.detach(), v_BLKC.detach()
    k_BTKC, v_BTKC = _gather(k_BLKC, v_BLKC, context)
    outputs, saved_chunks = [], []
    with torch.no_grad():
        for q_BSHC, chunk in zip(q_BLHC.chunk(2, dim=1), context.prepared.chunks, strict=True):
            o_BSHC, saved = KERNELS[kernel].forward(q_BSHC, k_BTKC, v_BTKC, chunk, context)
            outputs.append(o_BSHC)
            saved_chunks.append(saved)
    return torch.cat(outputs, dim=1), (q_BLHC, k_BLKC, v_BLKC, saved_chunks)


def _backward(
    kernel: str, saved: Saved, grad_o_BLHC: Tensor, context: AttentionContext
) -> tuple[Tensor, Tensor, Tensor]:
    q_BLHC, k_BLKC, v_BLKC, saved_chunks = saved
    k_BTKC, v_BTKC = _gather(k_BLKC, v_BLKC, context)
    dk_BTKC, dv_BTKC = torch.zeros_like(k_BTKC), torch.zeros_like(v_BTKC)
    queries, grads = q_BLHC.chunk(2, dim=1), grad_o_BLHC.chunk(2, dim=1)
    dq = []
    for q_BSHC, grad_BSHC, state, chunk in zip(
        queries, grads, saved_chunks, context.prepared.chunks, strict=True
    ):
        inputs = (q_BSHC, k_BTKC, v_BTKC)
        dq_BSHC, dk, dv = KERNELS[kernel].backward(grad_BSHC, inputs, state, chunk, context)
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


def check_chunks(need: Requirements, size: int, name: str) -> None:
    """Run the chunks of `size` processes on this device, and compare them with plain torch in float32.

    need: the attention problem of a row, of which a short one is checked. name: the backend. Raises RunError, with the
    remedy, if a chunk is wrong or cannot be computed here.
    """
    remedy = "leave parallel.context out"
    if name in OTHERS:
        remedy = f"use --compute.attention {OTHERS[name]}, or {remedy}"
    try:
        error = chunk_error(need, size, KERNELS[name])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as failure:
        raise RunError(
            f"parallel.context: {LIBRARIES[name]} cannot compute chunks of a row here: {first_line(failure)}; {remedy}"
        ) from failure
    if not error <= TOLERANCE[need.dtype]:
        raise RunError(
            f"parallel.context: {LIBRARIES[name]} computes chunks of a row wrongly here (relative error {error:.1e}); "
            f"{remedy}"
        )


def chunk_error(need: Requirements, size: int, kernel: ChunkKernel) -> float:
    """Return the largest relative error of outputs and gradients of all chunks of short rows, compared with float32."""
    tokens, generator = 256 * size, torch.Generator(need.device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        shape = (2, tokens, heads, need.head_dim)
        return torch.randn(shape, generator=generator, device=need.device).to(need.dtype)

    q, grad = normal(need.heads), normal(need.heads)
    k, v = normal(2 * need.kv_heads).chunk(2, dim=2)  # views, as those of gathered rows
    cu_seqlens = None
    if need.documents:
        # The first ends within a chunk, the second where a chunk ends, the third is the rest of the row.
        ends = [row * tokens + end for row in range(2) for end in (0, 77, tokens // 2)]
        cu_seqlens = torch.tensor([*ends, 2 * tokens], dtype=torch.int32, device=need.device)
    worst = 0.0
    for rank in range(size):
        ranks = ContextRanks(None, rank, size)
        context = AttentionContext(cu_seqlens=cu_seqlens, window=need.window, ranks=ranks)
        prepared = prepare_chunks(context, 2, tokens // size, need.device)
        context = replace(context, prepared=prepared)
        for chunk in prepared.chunks:
            part = slice(chunk.start, chunk.stop)
            inputs = (q[:, part], k, v)
            o, saved = kernel.forward(*inputs, chunk, context)
            found = [o, *kernel.backward(grad[:, part], inputs, saved, chunk, context)]
            leaves = [x[:, : chunk.stop].float().requires_grad_() for x in inputs]
            o = chunk_reference(leaves[0], leaves[1], leaves[2], chunk, context)
            error = worst_error(found, [o.detach(), *gradients([o], leaves, [grad[:, part].float()])])
            worst = max(worst, error)
    return worst


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BLHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, context: AttentionContext, kernel: str
    ) -> Tensor:
        o_BLHC, (q, k, v, saved_chunks) = _forward(kernel, q_BLHC, k_BLKC, v_BLKC, context)
        ctx.save_for_backward(q, k, v, *(x for saved in saved_chunks for x in saved))
        ctx.context, ctx.kernel = context, kernel
        return o_BLHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors
        half = len(rest) // 2
        saved = (q, k, v, [tuple(rest[:half]), tuple(rest[half:])])
        return *_backward(ctx.kernel, saved, grads[0], ctx.context), None, None


def gathered(
    kernel: str, q_BLHC: Tensor, k_BLKC: Tensor, v_BLKC: Tensor, context: AttentionContext
) -> Tensor:
    """(B, L, H, C), (B, L, K, C), (B, L, K, C) -> (B, L, H, C), L = T / c tokens of this process; differentiable."""
    o_BLHC: Tensor = _Gathered.apply(q_BLHC, k_BLKC, v_BLKC, context, kernel)
    return o_BLHC


def _register(
    name: str, devices: set[str], dtypes: frozenset[torch.dtype], masks: bool, on_request: set[str]
) -> None:
    """Register a kernel's backend. masks: it supports windows and documents."""
    register(
        AttentionBackend(
            name,
            partial(gathered, name),
            frozenset(devices),
            dtypes,
            window=masks,
            documents=masks,
            shared_rows=True,
            on_request=frozenset(on_request),
            prepare=prepare_chunks,
            pair=FwdBwd(partial(_forward, name), partial(_backward, name)),
        )
    )


_register("gathered", {"cpu", "cuda"}, FLOAT | {torch.float64}, masks=True, on_request=set())
_register("gathered-flash", {"cuda"}, HALF, masks=True, on_request={"cuda"})
_register("gathered-cudnn", {"cuda"}, HALF, masks=False, on_request={"cuda"})
