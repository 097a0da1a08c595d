"""The decoding kernels in Triton's interpreter compared with torch, and the torch form with float64."""

import math

import pytest
import torch

from deskside.kernels import decode
from deskside.kernels.attention import AttentionContext
from deskside.kernels.decode import gather_pages, paged_attention
from tests.budget.test_adapters import Live
from tests.kernels.interpreter import interpreted


def test_kernels_equal_the_torch_form() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("decode_interpreted", "kernels")
    assert len(found) == 29
    assert all(error < 1e-6 for error in found.values()), found


@pytest.mark.full
def test_engines_with_the_kernels_generate_the_same_tokens() -> None:
    pytest.importorskip("triton")
    found: dict[str, float] = interpreted("decode_interpreted", "engines")
    assert len(found) == 3 and not any(found.values()), found


def test_gather_puts_pages_in_the_order_of_the_table() -> None:
    pool = torch.arange(5 * 2 * 4 * 3).view(5, 2, 4, 3).float()
    table = torch.tensor([[3, 1], [0, 4]])
    got = gather_pages(pool, table, 6)
    assert got.shape == (2, 6, 2, 3)
    for row in range(2):
        for entry in range(6):
            assert torch.equal(got[row, entry], pool[table[row, entry // 4], :, entry % 4])


@pytest.mark.parametrize("window", [None, 3])
def test_attention_equals_float64_arithmetic(window: int | None) -> None:
    torch.manual_seed(1)
    k, v = (torch.randn(7, 2, 4, 8) for _ in range(2))
    table = torch.tensor([[2, 6, 1], [5, 0, 3]])
    positions = torch.tensor([[8, 9], [2, 3]])
    q = torch.randn(2, 2, 4, 8)
    got = paged_attention(q, k, v, table, positions, 12, AttentionContext(window=window))
    for b in range(2):
        for t in range(2):
            last = int(positions[b, t])
            seen = range(0 if window is None else max(0, last - window + 1), last + 1)
            for h in range(4):
                keys = [k[table[b, e // 4], h // 2, e % 4].double() for e in seen]
                values = [v[table[b, e // 4], h // 2, e % 4].double() for e in seen]
                weights = [math.exp(float(q[b, t, h].double() @ key) / math.sqrt(8)) for key in keys]
                truth = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
                torch.testing.assert_close(got[b, t, h].double(), truth, atol=1e-6, rtol=1e-5)


def cached(rows: int, length: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pools of keys and values with pages of 4 tokens, and the rows' tables."""
    torch.manual_seed(2)
    pages = -(-length // 4)
    k, v = (torch.randn(rows * pages + 1, K, 4, 8) for _ in range(2))
    return k, v, torch.randperm(rows * pages).view(rows, pages)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [2, 6])
def test_the_form_for_a_card_equals_the_reference(
    heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are in two chunks. The form uses only torch operators, so it also runs here."""
    monkeypatch.setattr("deskside.kernels.attention.reference.QUERY_CHUNK", 3)
    pool_k, pool_v, table = cached(2, 12, 2)
    k, v = gather_pages(pool_k, table, 11), gather_pages(pool_v, table, 11)
    q, positions = torch.randn(2, 5, heads, 8), torch.tensor([[6, 7, 8, 9, 10], [1, 2, 3, 4, 5]])
    options = AttentionContext(window=window, scale=0.3)
    expected = decode.decode_attention(q, k, v, positions, options)
    got = decode.decode_attention(q, k, v, positions, options, decode.attend_with_sdpa)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_keys_are_gathered_for_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, length = 64, 256
    k, v, table = cached(rows, length, 2)
    q, positions = torch.randn(rows, 1, 2, 8), torch.full((rows, 1), length - 1)
    whole = paged_attention(q, k, v, table, positions, length)
    one = 2 * length * 2 * 8 * 4  # keys and values of a row
    monkeypatch.setattr(decode, "GATHERED_BYTES", 3 * one)
    with Live(k, v, table, q, positions) as live:
        before = live.peak
        got = paged_attention(q, k, v, table, positions, length)
    torch.testing.assert_close(got, whole, atol=1e-6, rtol=1e-5)
    assert live.peak - before < 10 * one < rows * one


@pytest.mark.parametrize("groups", [1, 3, 48, 192, 2048])
@pytest.mark.parametrize("length", [32, 2048, 131_072, 1_048_576])
def test_spans_of_one_new_token_are_few_enough(length: int, groups: int) -> None:
    pytest.importorskip("triton")
    from deskside.kernels import decode_new_triton

    span = decode_new_triton.span_size(length, groups)
    spans = -(-length // span)
    assert span >= decode_new_triton.MIN_SPAN and span & (span - 1) == 0
    assert spans <= decode_new_triton.MAX_SPANS
    assert spans <= decode_new_triton.FEW_SPANS or spans * groups <= decode_new_triton.MAX_PROGRAMS
    if span > decode_new_triton.MIN_SPAN:  # no longer than needed
        more = -(-length // (span // 2))
        assert more > decode_new_triton.MAX_SPANS or more * groups > decode_new_triton.MAX_PROGRAMS
