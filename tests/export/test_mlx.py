"""Exports in mlx-lm, whose converter reads Hugging Face directories: the same logits, and nearby ones in 4 bits.

mlx also runs on Linux without a GPU: pip install 'mlx[cpu]' mlx-lm
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deskside.weights.hf import save_hf
from tests.data.chat_tokenizer import make as make_chat
from tests.export.test_hf_parity import random_model

mlx: Any = pytest.importorskip("mlx.core", reason="mlx is not installed")
mlx_lm: Any = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")


@pytest.mark.full
@pytest.mark.parametrize("case", [{}, {"qk_norm": False}, {"tie_word_embeddings": True}])
def test_mlx_computes_the_same(case: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    model = random_model(**{**case, **sizes}, vocab_size=512).eval()
    save_hf(model, model.config, make_chat(tmp_path), tmp_path / "out")
    ids = torch.randint(0, 400, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(ids).numpy()

    def theirs(folder: Path) -> np.ndarray:
        loaded, _ = mlx_lm.load(str(folder))
        return np.array(loaded(mlx.array(ids.tolist())).astype(mlx.float32))

    np.testing.assert_allclose(theirs(tmp_path / "out"), ours, atol=2e-5 * np.abs(ours).max())
    mlx_lm.convert(str(tmp_path / "out"), str(tmp_path / "mlx"), quantize=True, q_bits=4, q_group_size=32)
    error = np.linalg.norm(theirs(tmp_path / "mlx") - ours) / np.linalg.norm(ours)
    assert 0.01 < error < 0.35
