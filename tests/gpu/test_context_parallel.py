"""Shared rows on a GPU: FlashAttention of a chunk against float32, and a run on two GPUs against a run on one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.kernels.attention import Requirements, gathered
from tests.gpu.card import ADAMW, NEEDS_CARD, SHAPE, losses
from tests.train import tiny_run

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [2, 4])
def test_chunks_equal_plain_torch(size: int, head_dim: int, documents: bool, window: int | None) -> None:
    """In bfloat16, within the tolerance of every backend. Training makes the same check before it begins."""
    card = torch.device("cuda", 0)
    gathered.check_chunks(
        Requirements(1, 4096, 4, 2, head_dim, torch.bfloat16, card, window, documents), size
    )


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
