"""Log-likelihoods on a GPU: equal to those of whole rows in float32, close to them in bfloat16, with little memory."""

from pathlib import Path

import pytest
import torch

from deskside.evaluate.likelihood import Pair, likelihoods
from deskside.model.transformer import Transformer
from tests.evaluate.made_model import make, oracle
from tests.evaluate.test_likelihood import pairs
from tests.gpu.card import DEVICE, NEEDS_CARD

pytestmark = NEEDS_CARD

SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}


def model(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> Transformer:
    made = make(folder, **SHAPE, **options).model.to(DEVICE)
    for parameter in made.parameters():  # like the cast in export/load.py
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(dtype)
    return made.eval()


@pytest.mark.parametrize(
    "options", [{}, {"window_pattern": "SL", "sliding_window": 24}], ids=["full", "windows"]
)
def test_float32_equals_whole_rows(tmp_path: Path, options: dict[str, object]) -> None:
    made = model(tmp_path, **options)
    given = pairs(1)
    for batch_tokens in (200, 100_000):
        for pair, found in zip(given, likelihoods(made, given, batch_tokens=batch_tokens), strict=True):
            logprob, greedy = oracle(made, pair.context, pair.continuation)
            assert found.logprob == pytest.approx(logprob, rel=1e-5, abs=1e-3)
            assert found.greedy == greedy


def test_bfloat16_is_as_near_to_float32_as_whole_rows_are(tmp_path: Path) -> None:
    exact = model(tmp_path / "exact")
    made = model(tmp_path / "bf16", torch.bfloat16)
    given = pairs(1)
    ours = likelihoods(made, given, batch_tokens=4096)
    error = whole = 0.0
    for pair, found in zip(given, ours, strict=True):
        truth, _ = oracle(exact, pair.context, pair.continuation)
        error += (found.logprob - truth) ** 2
        whole += (oracle(made, pair.context, pair.continuation)[0] - truth) ** 2
    assert error < 1.5 * whole


def test_shared_contexts_are_computed_once(tmp_path: Path) -> None:
    """Many long answers to one context need the memory of one context and of the
    answers, not a copy of the context for each.
    """
    made = model(tmp_path, torch.bfloat16, max_position_embeddings=4096, num_hidden_layers=4)
    context = tuple(n % 320 for n in range(4000))
    given = [Pair(context, tuple((n + m) % 320 for m in range(8))) for n in range(64)]
    likelihoods(made, given[:2], batch_tokens=8192)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = likelihoods(made, given, batch_tokens=8192)
    used = torch.cuda.max_memory_allocated() - before
    copies = 64 * 4000 * made.kv_bytes_per_token(torch.bfloat16)
    assert used < copies / 2
    logprob, _ = oracle(made, context, given[5].continuation)
    assert found[5].logprob == pytest.approx(logprob, abs=2)
