from __future__ import annotations

import threading
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from deskside.data.reading.loader import Loader, LoaderOptions, validation_batches
from deskside.data.reading.rows import PackedDataset
from deskside.data.tokenizer import load, token_texts
from deskside.utils.errors import UsageError

T = 64


@pytest.fixture(scope="module")
def dataset(prepared: Path) -> PackedDataset:
    return PackedDataset(prepared, "train", T)


def steps(dataset: PackedDataset, count: int, start: int = 0, **options: object) -> list[torch.Tensor]:
    """Return the rows of each step, with its micro-batches concatenated."""
    with Loader(dataset, LoaderOptions(1, start, 12, **options)) as loader:  # type: ignore[arg-type]
        return [torch.cat([b.tokens_BT for b in step]) for step in islice(loader, count)]


def test_ranks_and_micro_batches_are_slices_of_one_order(dataset: PackedDataset) -> None:
    wanted = torch.from_numpy(dataset.rows(1, np.arange(60)).inputs).split(12)
    for micro in (12, 6, 1):
        for got, want in zip(steps(dataset, 5, micro_batch_rows=micro), wanted, strict=True):
            assert torch.equal(got, want)
    for world in (2, 3):
        ranks = [steps(dataset, 5, micro_batch_rows=2, rank=r, world_size=world) for r in range(world)]
        for s in range(5):
            assert torch.equal(torch.cat([rank[s] for rank in ranks]), wanted[s])


@pytest.mark.parametrize("document_mask", [True, False])
def test_future_targets_stay_within_their_document(prepared: Path, document_mask: bool) -> None:
    """The future targets of each piece are its own later targets, recomputed here piece by piece."""
    dataset = PackedDataset(prepared, "train", 2 * T)
    options = LoaderOptions(1, 0, 12, 6, document_mask=document_mask, future_targets=3)
    with Loader(dataset, options) as loader:
        step = next(loader)
    found = torch.cat([batch.future_targets_BTK for batch in step if batch.future_targets_BTK is not None])
    rows, wanted = dataset.rows(1, np.arange(12)), torch.full((12 * 2 * T, 3), -100)
    targets = torch.from_numpy(rows.targets).flatten()
    pieces = np.append(rows.boundaries, 12 * 2 * T).tolist()
    assert len(pieces) > 12 + 1
    for begin, end in pairwise(pieces):
        for k in (1, 2, 3):
            wanted[begin : max(begin, end - k), k - 1] = targets[begin + k : end]
    assert torch.equal(found.flatten(0, 1), wanted)


def test_resumes_at_any_row(dataset: PackedDataset) -> None:
    straight = steps(dataset, 5, micro_batch_rows=6)
    assert all(map(torch.equal, steps(dataset, 2, start=36, micro_batch_rows=6), straight[3:]))


def test_languages_by_temperature_resume_at_any_row(prepared: Path) -> None:
    """The few Hindi rows repeat in later epochs, and a loader that starts anywhere continues the same order."""
    mixed = PackedDataset(prepared, "train", T, language_temperature=5.0)
    whole = steps(mixed, 120, micro_batch_rows=12)
    for start in (1, 17, 113):
        for found, expected in zip(
            steps(mixed, 4, 12 * start, micro_batch_rows=3), whole[start:], strict=False
        ):
            assert torch.equal(found, expected)


def test_batch_contents(dataset: PackedDataset) -> None:
    with Loader(dataset, LoaderOptions(1, 0, 12, 4, world_size=3, rank=1)) as loader:
        step = next(loader)
        rows = dataset.rows(1, np.arange(12))
        for m, batch in enumerate(step):
            part = slice(4 + 4 * m, 8 + 4 * m)
            assert torch.equal(batch.targets_BT, torch.from_numpy(rows.targets[part]))
            assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
            assert batch.num_valid == int((rows.targets[part] != -100).sum())
            assert batch.num_valid_step == int((rows.targets != -100).sum())
            assert batch.cu_seqlens is not None and batch.positions_BT is not None
            assert batch.cu_seqlens.dtype == torch.int32
            assert len(batch.cu_seqlens) == dataset.max_boundaries(4) + 1
            starts = torch.nonzero(batch.positions_BT.flatten() == 0).flatten()
            cu = batch.cu_seqlens.tolist()
            assert cu[: len(starts)] == starts.tolist() and set(cu[len(starts) :]) == {4 * T}


def test_without_document_mask(dataset: PackedDataset) -> None:
    with Loader(dataset, LoaderOptions(1, 0, 2, 2, document_mask=False)) as loader:
        batch = next(loader)[0]
    assert batch.cu_seqlens is None and batch.positions_BT is None


def test_a_kept_batch_is_not_overwritten(dataset: PackedDataset) -> None:
    with Loader(dataset, LoaderOptions(1, 0, 4, 4)) as loader:
        first = next(loader)[0]
        copy = first.tokens_BT.clone()
        for _ in range(6):
            next(loader)
    assert torch.equal(first.tokens_BT, copy)


def test_errors_of_the_thread_reach_the_consumer(
    dataset: PackedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dataset.rows

    def rows(seed: int, positions: np.ndarray, out: object = None) -> object:
        if positions[0] >= 8:
            raise OSError(5, "Input/output error")
        return real(seed, positions, out)  # type: ignore[arg-type]

    monkeypatch.setattr(dataset, "rows", rows)
    with Loader(dataset, LoaderOptions(1, 0, 4, 4)) as loader:
        next(loader)
        next(loader)
        with pytest.raises(OSError, match="Input/output"):
            next(loader)


def test_close_ends_the_thread(dataset: PackedDataset) -> None:
    loader = Loader(dataset, LoaderOptions(1, 0, 4, 4))
    next(loader)
    assert any(t.name.startswith("deskside-loader") for t in threading.enumerate())
    loader.close()
    loader.close()
    assert not any(t.name.startswith("deskside-loader") for t in threading.enumerate())
    assert list(loader) == []


def test_indivisible_steps_are_refused(dataset: PackedDataset) -> None:
    with pytest.raises(UsageError, match="multiple of 8 rows"):
        Loader(dataset, LoaderOptions(0, 0, 12, 4, world_size=2))


@pytest.mark.parametrize("max_rows", [None, 10])
def test_validation_batches(prepared: Path, max_rows: int | None) -> None:
    val = PackedDataset(prepared, "val", T)
    batches = list(validation_batches(val, 7, max_rows=max_rows))
    rows = val.num_rows if max_rows is None else max_rows
    assert len(batches) == -(-rows // 7) and all(b.tokens_BT.shape == (7, T) for b in batches)
    assert len({len(b.cu_seqlens) for b in batches if b.cu_seqlens is not None}) == 1
    targets = torch.cat([b.targets_BT for b in batches])
    valid = int((targets != -100).sum())
    assert sum(b.num_valid for b in batches) == valid == batches[0].num_valid_step
    assert (targets[rows:] == -100).all()
    for b in batches:
        assert b.cu_seqlens is not None and b.positions_BT is not None
        starts = torch.nonzero(b.positions_BT.flatten() == 0).flatten().tolist()
        cu = b.cu_seqlens.tolist()
        assert cu[: len(starts)] == starts and set(cu[len(starts) :]) == {7 * T}
    if max_rows is None:
        counted = int(val.token_bytes[targets[targets != -100].numpy()].sum(dtype=np.int64))
        assert counted == val.index.splits["val"].text_bytes


def test_languages_of_validation_batches(prepared: Path) -> None:
    """Hindi letters occur only in Hindi documents, and English letters only in English documents."""
    val = PackedDataset(prepared, "val", T)
    texts = token_texts(load(prepared))
    assert val.languages == ["en", "hi"]
    seen = {"en": 0, "hi": 0}
    for batch in validation_batches(val, 7):
        assert batch.languages_BT is not None
        languages_BT, positions_BT = batch.languages_BT, batch.positions_BT
        assert positions_BT is not None and languages_BT.shape == batch.targets_BT.shape
        padding = (batch.targets_BT == -100) & (batch.tokens_BT == val.index.tokenizer.eos_id)
        assert torch.equal(languages_BT == -1, padding)
        # The language changes only where a document begins.
        changes = languages_BT[:, 1:] != languages_BT[:, :-1]
        assert (positions_BT[:, 1:][changes] == 0).all()
        for language, target in zip(
            languages_BT.flatten().tolist(), batch.targets_BT.flatten().tolist(), strict=True
        ):
            letters = (
                [c for c in texts[target].decode("utf-8", "ignore") if c.isalpha()] if target >= 0 else []
            )
            if letters:
                name = val.languages[language]
                assert all((c > "\u0900") == (name == "hi") for c in letters)
                seen[name] += 1
    assert min(seen.values()) > 100
