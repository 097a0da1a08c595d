"""Shared rows on a card: FlashAttention of a chunk against float32, and, with two cards, a run against one card's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.kernels.attention import AttentionContext, ContextRanks
from deskside.kernels.attention.choose import worst_error
from deskside.kernels.attention.gathered import (
    prepared_spans,
    span_flash,
    span_flash_backward,
    span_reference,
)
from tests.gpu.card import ADAMW, NEEDS_CARD, SHAPE, losses
from tests.train import tiny_run

pytestmark = NEEDS_CARD
B, T, HEADS, KV_HEADS, HEAD_DIM = 2, 1024, 4, 2, 64
BOUNDARIES = [0, 100, 101, 300, 512, 900, 1024, 1024 + 700, 2048, 2048]


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_chunks_equal_the_reference(size: int, documents: bool, window: int | None) -> None:
    """In bfloat16 against float32 within 2e-2, as for every backend (kernels/attention/choose.py)."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn((B, T, heads, HEAD_DIM), generator=generator, device="cuda").bfloat16()

    q, k, v, grad = normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), normal(HEADS)
    cu = torch.tensor(BOUNDARIES, dtype=torch.int32, device="cuda") if documents else None
    for rank in range(size):
        ranks = ContextRanks(None, rank, size)
        context = AttentionContext(cu_seqlens=cu, window=window, backend="gathered", ranks=ranks)
        context = replace(context, prepared=prepared_spans(context, B, T // size, q.device))
        for span in context.prepared.spans:
            part = slice(span.start, span.stop)
            o, saved = span_flash(q[:, part], k, v, span, context)
            found = [o, *span_flash_backward(grad[:, part], (q[:, part], k, v), saved, span, context)]
            leaves = [x.float().requires_grad_() for x in (q[:, part], k[:, : span.stop], v[:, : span.stop])]
            expected = span_reference(leaves[0], leaves[1], leaves[2], span, context)
            gradients = torch.autograd.grad(expected, leaves, grad[:, part].float())
            assert worst_error(found, [expected.detach(), *gradients]) < 2e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("documents", [False, True])
def test_two_cards_train_like_one(documents: bool, data: Path, tmp_path: Path) -> None:
    """In bfloat16, whose rounding alone moves a loss by up to 1e-2."""
    changes: dict[str, Any] = {
        "model": {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        "optim": ADAMW,
        "schedule": {"length": "20 steps"},
        "batch": {"sequence_length": 128, "tokens": 512, "micro_tokens": 256},
        "data": {"document_mask": documents},
        "compute": {"device": "cuda", "attention": "auto"},
        "precision": {"name": "bf16"},
    }
    alone = tiny_run.train(tmp_path, tiny_run.config(data, **changes), "alone").run.path
    config = tiny_run.config(data, **changes, parallel={"context": 2})
    child = tiny_run.call(tiny_run.train, tmp_path, config, "together", log=tmp_path / "log", ranks=2)
    assert child.wait(300) == 0, child.text()
    assert losses(tmp_path / "together") == pytest.approx(losses(alone), abs=1e-2)
