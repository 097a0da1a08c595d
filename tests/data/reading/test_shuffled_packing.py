"""Rows of shuffled packing: each epoch has every token of every document once, with other neighbors and cuts."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.reading.loader import Loader, LoaderOptions
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.data.reading.shuffled_packing import ShuffledPacking, max_pieces

T = 64


@pytest.fixture(scope="module")
def dataset(prepared: Path) -> PackedDataset:
    return PackedDataset(prepared, "train", T, packing="shuffled")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(2, 16), st.integers(0, 2**64 - 1))
def test_every_token_of_every_document_comes_once(lengths: list[int], width: int, key: int) -> None:
    """Each document is contiguous and is cut only at the ends of rows, and all rows except the last are full."""
    length = np.array([*lengths, 5])
    start = np.cumsum(length + 3) - length  # with gaps between the documents
    packing = ShuffledPacking(start, length, width)
    assert packing.num_rows == -(-int(length.sum()) // width) == len(packing.row_tokens())
    found = []
    for row, tokens in enumerate(packing.row_tokens().tolist()):
        starts, sizes = packing.pieces(row, key)
        assert sizes.min() > 0 and sizes.sum() == tokens and (tokens == width or row == packing.num_rows - 1)
        assert len(sizes) + (tokens < width) <= max_pieces([packing], 1)
        found += [
            token for a, n in zip(starts.tolist(), sizes.tolist(), strict=True) for token in range(a, a + n)
        ]
    assert sorted(found) == [
        t for a, n in zip(start.tolist(), length.tolist(), strict=True) for t in range(a, a + n)
    ]
    begins = {int(a): n for a, n in zip(start, length, strict=True) if n}
    at = 0
    while at < len(found):  # the stream consists of whole documents, one after the other
        assert found[at : at + begins[found[at]]] == list(range(found[at], found[at] + begins[found[at]]))
        at += begins[found[at]]


def test_epochs_have_the_same_tokens_in_other_rows(dataset: PackedDataset, prepared: Path) -> None:
    n = dataset.num_rows
    whole = dataset.rows(5, np.arange(3 * n))
    epochs = [slice(e * n, (e + 1) * n) for e in range(3)]
    pairs = [
        np.sort(
            whole.inputs[e][whole.targets[e] != IGNORE] * 10**6 + whole.targets[e][whole.targets[e] != IGNORE]
        )
        for e in epochs
    ]
    assert np.array_equal(pairs[0], pairs[1]) and np.array_equal(pairs[0], pairs[2])
    best_fit = PackedDataset(prepared, "train", T)
    assert (
        len(pairs[0]) == dataset.num_tokens == best_fit.num_tokens and dataset.num_rows <= best_fit.num_rows
    )
    rows = [set(map(bytes, whole.inputs[e])) for e in epochs]
    # Rows within a document that spans many rows may be cut alike by chance. The others are new.
    assert len(rows[0] & rows[1]) < 0.1 * n and len(rows[1] & rows[2]) < 0.1 * n
    assert whole.num_valid.tolist() == (whole.targets != IGNORE).sum(1).tolist()
    some = np.array([2 * n + 1, 7, n, n - 1])
    assert np.array_equal(dataset.rows(5, some).inputs, whole.inputs[some])
    assert np.array_equal(dataset.num_valid_at(5, some), whole.num_valid[some])
    assert not np.array_equal(dataset.rows(6, np.arange(n)).inputs, whole.inputs[:n])


def test_any_ranks_and_any_resume_read_the_same_order(prepared: Path) -> None:
    """Holds also with a mixture whose components are in different epochs."""
    dataset = PackedDataset(prepared, "train", 4 * T, language_temperature=5.0, packing="shuffled")
    steps = 2 * dataset.num_rows // 12 + 1

    def read(start: int, count: int, **options: int) -> list[torch.Tensor]:
        given = LoaderOptions(1, 12 * start, 12, **{"micro_batch_rows": 12, **options})  # type: ignore[arg-type]
        with Loader(dataset, given) as loader:
            return [torch.cat([b.tokens_BT for b in step]) for step in islice(loader, count)]

    whole = read(0, steps)
    assert torch.equal(torch.cat(whole), torch.from_numpy(dataset.rows(1, np.arange(12 * steps)).inputs))
    for start in (1, dataset.num_rows // 12, steps - 2):
        assert all(map(torch.equal, read(start, 2, micro_batch_rows=3), whole[start:]))
        ranks = [read(start, 2, micro_batch_rows=2, rank=r, world_size=3) for r in range(3)]
        for step in range(2):
            assert torch.equal(torch.cat([rank[step] for rank in ranks]), whole[start + step])


def test_the_bound_on_pieces_holds(dataset: PackedDataset) -> None:
    n = dataset.num_rows
    starts = dataset.rows(2, np.arange(2 * n)).row_boundaries
    for rows in (1, 4, n + 3):
        most = max(int(starts[a + rows] - starts[a]) for a in range(2 * n - rows + 1))
        assert most <= dataset.max_boundaries(rows)
