"""Chunks of shared rows computed as a causal square and a rectangle, with torch's kernels for a CPU in cuDNN's place:
outputs and gradients compared with those of whole rows under autograd in float64.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.kernels.attention import AttentionContext, ContextRanks, Requirements, gathered
from deskside.kernels.attention.chunks import ChunkKernel, MergedParts, PartKernel, merge, prepare_chunks
from deskside.kernels.attention.context import backend_named

B, T, HEADS, KV_HEADS, HEAD_DIM = 2, 48, 4, 2, 8
GROUP = HEADS // KV_HEADS
SIZES = [2, 3]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
aten = torch.ops.aten


def grouped(x_BLKC: Tensor) -> Tensor:
    """Return (B, H, L, C), because the CPU's kernels have no grouped heads."""
    return x_BLKC.transpose(1, 2).repeat_interleave(GROUP, dim=1)


def cpu_part(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), grouped(k), grouped(v), 0.0, causal, scale=scale
    )
    # with an additional dimension, as from cuDNN, and a tensor in the place of its random state
    return o.transpose(1, 2), lse[..., None], (torch.ones(1),)


def cpu_part_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    lse: Tensor,
    rest: Any,
    causal: bool,
    scale: float | None,
) -> Any:
    q, k, v = inputs
    assert len(rest) == 1 and lse.shape == (*q.shape[:1], HEADS, q.shape[1], 1)
    tensors = (
        grad.transpose(1, 2),
        q.transpose(1, 2),
        grouped(k),
        grouped(v),
        o.transpose(1, 2),
        lse[..., 0],
    )
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
    dq, dk, dv = (x.transpose(1, 2) for x in found)
    return dq, *(x.unflatten(2, (KV_HEADS, GROUP)).sum(3) for x in (dk, dv))


PARTS = MergedParts(PartKernel(cpu_part, cpu_part_backward))
MERGED = ChunkKernel(PARTS.forward, PARTS.backward)


def problem(dtype: torch.dtype, scale: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return q, k, v and the gradient of the output of whole rows, and in float64, by torch's own attention and
    autograd, the output and the gradients of q, k and v.
    """
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, T, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    # Larger queries, so that both parts of a chunk differ much in their log-sum-exps.
    factors = (4.0, 1.0, 1.0, 1.0)
    whole = [
        (factor * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for shape, factor in zip(shapes, factors, strict=True)
    ]
    leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in whole[:3]]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(
        1, 2
    )
    return whole, [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_add_up_to_whole_rows(size: int, scale: float | None, dtype: torch.dtype) -> None:
    (q, k, v, grad), (out, *expected) = problem(dtype, scale)
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    for rank in range(size):
        context = AttentionContext(ranks=ContextRanks(None, rank, size), scale=scale)
        for chunk in prepare_chunks(context, B, T // size, q.device).chunks:
            own = slice(chunk.start, chunk.stop)
            o, saved = MERGED.forward(q[:, own], k, v, chunk, context)
            found = MERGED.backward(grad[:, own], (q[:, own], k, v), saved, chunk, context)
            assert o.dtype == dtype and all(x.dtype == dtype for x in found)
            close(o, out[:, own], TOLERANCES[dtype])
            close(found[0], expected[0][:, own], TOLERANCES[dtype])
            dk[:, : chunk.stop] += found[1]
            dv[:, : chunk.stop] += found[2]
    close(dk, expected[1], TOLERANCES[dtype])
    close(dv, expected[2], TOLERANCES[dtype])


@dataclass(frozen=True)
class Alone(ContextRanks):
    """One process of several in a test: it is given whole keys and values, and keeps the gradients that it sends."""

    rows: Tensor
    sent: list[Tensor]

    def gather(self, x_BLKC: Tensor) -> Tensor:
        torch.testing.assert_close(x_BLKC, self.local(self.rows), rtol=0, atol=0)
        return self.rows

    def sum_parts(self, x_BTKC: Tensor) -> Tensor:
        self.sent.append(x_BTKC)
        return self.local(x_BTKC)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_backend_saves_what_its_backward_needs(
    size: int, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autograd and as a pair of functions, whole rows come out; in float64, within 1e-12."""
    monkeypatch.setitem(gathered.KERNELS, "gathered-cudnn", MERGED)
    backend = backend_named("gathered-cudnn")
    assert backend.pair is not None
    (q, k, v, grad), (out, *expected) = problem(torch.float64, None)
    sent: list[Tensor] = []
    for rank in range(size):
        ranks = Alone(None, rank, size, torch.cat((k, v), dim=2), sent)
        context = AttentionContext(backend="gathered-cudnn", ranks=ranks)
        context = replace(context, prepared=prepare_chunks(context, B, T // size, q.device))
        part = [ranks.local(x) for x in (q, k, v)]
        if by_hand:
            o, saved = backend.pair.forward(part[0], part[1], part[2], context)
            dq = backend.pair.backward(saved, ranks.local(grad), context)[0]
        else:
            leaves = [x.requires_grad_() for x in part]
            o = backend.function(leaves[0], leaves[1], leaves[2], context)
            dq = torch.autograd.grad(o, leaves, ranks.local(grad))[0]
        torch.testing.assert_close(o, ranks.local(out), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dq, ranks.local(expected[0]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(sent), torch.cat(expected[1:], dim=2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gap", [-300.0, -1.0, 0.0, 40.0, 300.0])
def test_a_merge_of_softmaxes(gap: float) -> None:
    """Outputs in bfloat16 and log-sum-exps in float32, beside float64; a large gap does not overflow."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(1, 5, 2, 4, generator=generator).bfloat16() for _ in range(2))
    lse = torch.randn(1, 2, 5, generator=generator)
    other = lse + gap
    o, total = merge(first, lse, second, other)
    weight = (1 / (1 + torch.exp(-torch.tensor(gap, dtype=torch.float64)))).expand_as(first)
    torch.testing.assert_close(o.double(), (1 - weight) * first + weight * second, rtol=2**-7, atol=1e-5)
    expected = torch.logsumexp(torch.stack((lse, other)).double(), dim=0)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


ROWS = Requirements(1, 256, 4, 2, 64, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "seconds", "name"),
    [
        ({}, {"cudnn": 1.0, "flash": 2.0, "sdpa": 0.5}, "gathered-cudnn"),
        ({}, {"cudnn": 1.0}, "gathered-cudnn"),  # --compute.attention cudnn
        ({}, {"cudnn": 2.0, "flash": 1.0}, "gathered-flash"),  # Ampere, for example
        ({}, {"flash": 1.0}, "gathered-flash"),  # deterministic kernels, or asked for
        ({}, {"fa4": 1.0}, "gathered-flash"),
        ({}, {}, "gathered-flash"),  # a run that was recorded without it
        ({"documents": True}, {"varlen": 1.0}, "gathered-flash"),
        ({"documents": True}, {"cudnn": 1.0}, "gathered-flash"),
        ({"window": 64}, {"cudnn": 1.0}, "gathered-flash"),
        ({"dtype": torch.float32}, {"sdpa": 1.0}, "gathered"),
        ({"device": torch.device("cpu")}, {"sdpa": 1.0}, "gathered"),
    ],
)
def test_the_kernel_of_shared_rows_follows_from_the_trial_of_whole_ones(
    changes: dict[str, Any], seconds: dict[str, float], name: str
) -> None:
    assert gathered.backend_for(replace(ROWS, **changes), seconds) == name
