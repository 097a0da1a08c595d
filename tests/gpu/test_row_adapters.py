"""Rows with different adapters on a GPU: CUDA graphs give the tokens and log-probabilities of single steps."""

import pytest
import torch

from benchmarks.decode import random_adapters
from deskside.engine.engine import Engine
from deskside.engine.requests import Request
from tests.engine.test_generate import make
from tests.gpu.card import DEVICE, NEEDS_CARD

pytestmark = NEEDS_CARD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_choose_adapters_by_row(dtype: torch.dtype) -> None:
    shape = {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 256, "attention_bias": True}
    model = make(**shape).to(DEVICE, dtype)
    choice = random_adapters(model, (4, 8), dora=True)
    given = [Request((number + 1,) * 20, 40, logprobs=True, adapter=number % 3) for number in range(9)]
    alone = Engine(model, adapters=choice, max_tokens=8192, max_batch=1, graphs=False)
    wanted = [alone.run([request])[0][0] for request in given]
    engine = Engine(model, adapters=choice, max_tokens=8192, max_batch=16)
    for _ in range(3):  # captured, then replayed
        for found, other in zip(engine.run(given), wanted, strict=True):
            same = next(
                (n for n, (a, b) in enumerate(zip(found[0].tokens, other.tokens, strict=True)) if a != b), 40
            )
            assert same >= 8  # from there on, rounding may decide between nearly equal tokens
            torch.testing.assert_close(found[0].logprobs[:8], other.logprobs[:8], rtol=0.05, atol=0.05)
