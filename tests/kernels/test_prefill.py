"""Attention of packed prompts: the kernel in Triton's interpreter, and the
torch form compared with float64 arithmetic.
"""

import math

import pytest
import torch

from deskside.kernels.attention import AttentionContext
from deskside.kernels.prefill import packed_attention
from tests.kernels.interpreter import interpreted


def test_the_kernel_equals_the_torch_form() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("prefill_interpreted", "kernels")
    assert len(found) == 10
    assert max(found.values()) < 1e-6, found


@pytest.mark.full
def test_engines_with_the_kernel_generate_the_same_tokens() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("prefill_interpreted", "engines")
    assert len(found) == 2 and not any(found.values()), found


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_rows_equal_float64_arithmetic(window: int | None, softcap: float | None) -> None:
    """Three kinds of rows: a whole prompt, a part after cached tokens, and an
    empty one; two tokens of padding at the end.
    """
    torch.manual_seed(1)
    k, v = (torch.randn(9, 2, 4, 8) for _ in range(2))
    table = torch.tensor([[2, 6, 1], [5, 0, 3], [7, 8, 4]])
    lengths, counts = [0, 5, 2], [6, 3, 0]
    cu_seqlens = torch.tensor([0, 6, 9, 9])
    q = torch.randn(11, 4, 8)
    options = AttentionContext(window=window, softcap=softcap, scale=0.5)
    got = packed_attention(q, k, v, table, torch.tensor(lengths), cu_seqlens, options)
    assert not got[9:].any()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for t in range(count):
            token = int(cu_seqlens[row]) + t
            last = length + t
            seen = range(0 if window is None else max(0, last - window + 1), last + 1)
            for h in range(4):
                keys = [k[table[row, e // 4], h // 2, e % 4].double() for e in seen]
                values = [v[table[row, e // 4], h // 2, e % 4].double() for e in seen]
                scores = [float(q[token, h].double() @ key) * 0.5 for key in keys]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = [math.exp(score) for score in scores]
                truth = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
                torch.testing.assert_close(got[token, h].double(), truth, atol=1e-6, rtol=1e-5)
