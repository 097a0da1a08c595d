"""Document masks in rows of 16,384 tokens are correct, and their memory grows linearly with the row."""

from dataclasses import replace

import pytest
import torch

from deskside.kernels.attention import AttentionContext, Requirements, choose, prepare
from deskside.kernels.attention.context import backend_named
from tests.gpu.card import NEEDS_CARD

pytestmark = NEEDS_CARD
T, HEADS, KV_HEADS, HEAD_DIM = 16384, 4, 2, 64
NEED = Requirements(1, T, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, torch.device("cuda", 0), documents=True)


def test_a_backend_is_chosen_for_documents_in_long_rows() -> None:
    choice = choose(NEED)
    assert choice.name in ("varlen", "flex", "fa4") and choice.errors[choice.name] < 2e-2


@pytest.mark.parametrize("name", ["varlen", "flex"])
def test_masks_have_no_memory_of_the_square(name: str) -> None:
    """A row twice as long needs at most slightly more than twice the memory. A
    dense bool mask alone would add 256 MiB.
    """
    peaks = []
    for tokens in (T // 2, T):
        ends = torch.tensor([0, 100, tokens // 3, tokens, tokens], dtype=torch.int32, device="cuda")
        need = replace(NEED, tokens=tokens)
        shape = (1, tokens, HEADS, HEAD_DIM)
        q = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(
                (1, tokens, KV_HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for _ in range(2)
        )
        for _ in range(2):  # the first call compiles
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            context = prepare(AttentionContext(cu_seqlens=ends, max_seqlen=tokens, backend=name), need)
            backend_named(name).function(q, k, v, context).sum().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[3] <= 2.5 * peaks[1] + 2**20 and peaks[3] < 2**28
