from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.reading.packing import assign_best_fit, cut, pack


def best_fit_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Return the free space of each row after placing the pieces one by one:
    longest first, into the fullest row that fits.
    """
    space: list[int] = []
    for length in sorted(lengths, reverse=True):
        best = min((r for r in range(len(space)) if space[r] >= length), key=lambda r: space[r], default=None)
        if best is None:
            space.append(capacity - length)
        else:
            space[best] -= length
    return sorted(space)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(1, capacity), max_size=120)), capacity


@given(pieces())
@settings(max_examples=300, deadline=None)
def test_packing_equals_placing_pieces_one_by_one(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    row = assign_best_fit(np.array(lengths, dtype=np.int32), capacity)
    filled = np.bincount(row, weights=lengths).astype(int) if lengths else np.zeros(0, int)
    assert sorted((capacity - filled).tolist()) == best_fit_one_by_one(lengths, capacity)


@given(st.lists(st.integers(0, 200), max_size=60), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_every_token_is_packed_once_and_no_row_overflows(lengths: list[int], width: int) -> None:
    length = np.array(lengths, dtype=np.int64)
    start = np.cumsum(length) - length
    packing = pack(start, length, width)
    seen = np.zeros(int(length.sum()), dtype=int)
    owner = np.repeat(np.arange(len(length)), length)
    for begin, size in zip(packing.start, packing.length, strict=True):
        seen[begin : begin + size] += 1
        assert len(set(owner[begin : begin + size])) == 1, "a piece crosses documents"
    assert (seen == 1).all()
    rows = packing.row_tokens()
    assert (rows <= width).all() and (rows > 0).all()
    assert packing.num_tokens == length.sum()
    if len(rows):
        assert packing.utilisation == pytest.approx(rows.mean() / width)


def test_cut_gives_whole_rows_then_the_rest() -> None:
    start, length = cut(np.array([0, 10, 13]), np.array([10, 3, 8]), 4)
    assert start.tolist() == [0, 4, 8, 10, 13, 17]
    assert length.tolist() == [4, 4, 2, 3, 4, 4]


def test_same_input_same_rows_of_a_million_pieces() -> None:
    """A quadratic algorithm would exceed the time limit of the tests."""
    rng = np.random.default_rng(0)
    length = np.minimum(rng.lognormal(6, 1.3, 1_000_000).astype(np.int64) + 2, 100_000)
    start = np.cumsum(length) - length
    first = pack(start, length, 2048)
    second = pack(start, length, 2048)
    assert np.array_equal(first.start, second.start) and np.array_equal(first.row_start, second.row_start)
    assert first.num_tokens == length.sum() and first.utilisation > 0.999


@pytest.mark.full
def test_ten_million_documents() -> None:
    rng = np.random.default_rng(1)
    length = np.minimum(rng.lognormal(6, 1.3, 10_000_000).astype(np.int64) + 2, 100_000)
    packing = pack(np.cumsum(length) - length, length, 2048)
    assert packing.num_tokens == length.sum() and int(packing.row_tokens().max()) <= 2048
