"""Shared rows on a GPU: chunks against plain torch, their speed, and a run on two GPUs against a run on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from deskside.kernels.attention import AttentionContext, ContextRanks, Requirements, gathered
from deskside.kernels.attention.choose import worst_error
from deskside.kernels.attention.chunks import CUDNN_CHUNKS, prepare_chunks
from tests.gpu.card import ADAMW, NEEDS_CARD, SHAPE, losses
from tests.train import tiny_run

pytestmark = NEEDS_CARD


CARD = torch.device("cuda", 0)
# cuDNN's backward needs compute capability 8.
CUDNN = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="cuDNN needs 8.0"
)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [2, 4])
def test_chunks_equal_plain_torch(size: int, head_dim: int, documents: bool, window: int | None) -> None:
    """In bfloat16, within the tolerance of every backend. Training makes the same check before it begins."""
    need = Requirements(1, 4096, 4, 2, head_dim, torch.bfloat16, CARD, window, documents)
    gathered.check_chunks(need, size, "gathered-flash")


@CUDNN
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [2, 4])
def test_cudnn_chunks_pass_the_check_of_a_run(size: int, head_dim: int) -> None:
    need = Requirements(1, 4096, 4, 2, head_dim, torch.bfloat16, CARD)
    gathered.check_chunks(need, size, "gathered-cudnn")


@CUDNN
@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 128), (3, 3, 64)])
@pytest.mark.parametrize("batch", [1, 2])
def test_cudnn_chunks_equal_float64(batch: int, heads: tuple[int, int, int]) -> None:
    """Outputs and gradients of both chunks of each of two processes, beside torch's own attention of whole rows in
    float64. The parts differ in their log-sum-exps, because the queries are large.
    """
    H, K, C = heads
    T = 1024
    generator = torch.Generator(CARD).manual_seed(0)
    # Views, as of a fused projection and of gathered rows.
    q, grad = torch.randn(batch, T, 2 * H, C, generator=generator, device=CARD).bfloat16().chunk(2, dim=2)
    k, v = torch.randn(batch, T, 2 * K, C, generator=generator, device=CARD).bfloat16().chunk(2, dim=2)
    q = 3 * q if batch == 1 else q
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        o = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True
        ).transpose(1, 2)
    expected = [o.detach(), *torch.autograd.grad(o, leaves, grad.double())]
    found = [torch.zeros_like(x) for x in expected]
    for rank in range(2):
        context = AttentionContext(ranks=ContextRanks(None, rank, 2))
        for chunk in prepare_chunks(context, batch, T // 2, CARD).chunks:
            own = slice(chunk.start, chunk.stop)
            out, saved = CUDNN_CHUNKS.forward(q[:, own], k, v, chunk, context)
            dq, dk, dv = CUDNN_CHUNKS.backward(grad[:, own], (q[:, own], k, v), saved, chunk, context)
            found[0][:, own], found[1][:, own] = out, dq
            found[2][:, : chunk.stop] += dk
            found[3][:, : chunk.stop] += dv
            parts = [out, dq]
            errors = [worst_error([x], [y[:, own]]) for x, y in zip(parts, expected[:2], strict=True)]
            assert max(errors) < 1e-2, f"chunk {chunk.start}:{chunk.stop}, output and dq: {errors}"
    errors = [worst_error([x], [y]) for x, y in zip(found, expected, strict=True)]
    assert max(errors) < 1e-2, f"output, dq, dk, dv: {errors}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("documents", [False, True])
def test_two_cards_train_like_one(documents: bool, data: Path, tmp_path: Path) -> None:
    """In bfloat16, rounding alone changes a loss by up to 1e-2."""
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
