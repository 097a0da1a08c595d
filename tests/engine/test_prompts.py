"""Parts of prompts: how the tokens of a pass are divided among rows, and how they are packed."""

from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from deskside.engine.graphs import TOKENS, token_bucket
from deskside.engine.prompts import PackedPrompts, choose_parts, pack
from deskside.engine.requests import Request, RowState
from deskside.engine.sampling import GREEDY, SamplingValues

SETTINGS = SamplingValues.of(GREEDY, 0)


def row(number: int, length: int, prefilled: int = 0) -> RowState:
    prompt = tuple(range(100 * number, 100 * number + length))
    asked = Request(prompt, 1)
    made = RowState(number, 0, asked, length + 1, array("q", prompt), [], None, SETTINGS, slot=number)
    made.prefilled = prefilled
    return made


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_parts_fill_the_budget_and_favour_the_oldest_and_the_short(lengths: list[int], budget: int) -> None:
    rows = [row(number, length) for number, length in enumerate(lengths)]
    parts = choose_parts(rows, budget)
    counts = {part.number: count for part, count in parts}
    assert len(counts) == len(parts)
    assert all(1 <= count <= lengths[number] for number, count in counts.items())
    assert sum(counts.values()) == min(budget, sum(lengths))
    assert counts[0] >= min(lengths[0], -(-budget // 2))
    # A row gets tokens only if every shorter one, apart from the oldest, is finished.
    for number, count in counts.items():
        if number:
            assert all(
                counts.get(n) == lengths[n] for n in range(1, len(rows)) if lengths[n] < lengths[number]
            ), count


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(8, 64))
def test_every_prompt_ends_after_as_many_passes_as_its_tokens_need(lengths: list[int], budget: int) -> None:
    """No row starves: all are done after as many passes as their tokens fill, the last one possibly in part."""
    rows = [row(number, length) for number, length in enumerate(lengths)]
    passes = 0
    while unfinished := [r for r in rows if not r.prefill_done]:
        for part, count in choose_parts(unfinished, budget):
            part.prefilled += count
        passes += 1
    assert passes == -(-sum(lengths) // budget)


def test_a_short_prompt_passes_a_long_one() -> None:
    long, short = row(0, 1000), row(1, 10)
    assert [(part.number, count) for part, count in choose_parts([long, short], 100)] == [(0, 90), (1, 10)]


def test_packed_parts_are_views_of_one_tensor() -> None:
    first, second = row(3, 5), row(7, 9, prefilled=4)
    parts = [(first, 5), (second, 2)]
    for part, count in parts:
        part.prefilled += count
    packed = pack(parts, lanes=4, tokens=16, dummy=8)
    prompts = PackedPrompts.of(packed, 4)
    assert prompts.lanes_L.tolist() == [3, 7, 8, 8]
    assert prompts.complete_L.tolist() == [1, 0, 0, 0]
    assert prompts.cu_seqlens.tolist() == [0, 5, 7, 7, 7]
    assert prompts.tokens_1N.tolist() == [[*range(300, 305), 704, 705, *[0] * 9]]
    assert packed.dtype == torch.int64


def test_buckets_of_tokens_are_few_and_waste_little() -> None:
    sizes = [token_bucket(tokens) for tokens in range(1, TOKENS[-1] + 1)]
    assert sizes == sorted(sizes) and len(set(sizes)) < 20
    assert all(tokens <= size for tokens, size in enumerate(sizes, 1))
    assert all(size <= 1.5 * tokens for tokens, size in enumerate(sizes, 1) if tokens > 256)
    assert set(TOKENS) <= set(sizes)
