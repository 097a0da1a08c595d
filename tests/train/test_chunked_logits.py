"""A run never computes logits of more than `compute.loss_chunk_tokens` tokens
at a time, in training and evaluation.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deskside.kernels import cross_entropy
from tests.train import tiny_run


@pytest.mark.parametrize("chunk", [48, 1000])
def test_no_logits_of_more_tokens(
    chunk: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {"chunk_loss": set(), "chunk_loss_and_grad": set()}
    for name, sizes in seen.items():
        original = getattr(cross_entropy, name)

        def counted(logits: Tensor, *more: Any, original: Any = original, sizes: set[int] = sizes) -> Any:
            sizes.add(len(logits))
            return original(logits, *more)

        monkeypatch.setattr(cross_entropy, name, counted)
    changes = {"compute": {"loss_chunk_tokens": chunk}, "schedule": {"length": "2 steps"}}
    tiny_run.train(tmp_path, tiny_run.config(data, **changes))
    for sizes in seen.values():
        assert max(sizes) == min(chunk, 256)
