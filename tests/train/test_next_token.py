"""Pretraining as an objective."""

from pathlib import Path

import pytest
import torch

from deskside.data.reading.loader import Loader, LoaderOptions
from deskside.data.reading.rows import PackedDataset
from deskside.train.next_token import worst_case_batch


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_worst_batch_has_the_shapes_of_the_loader_and_no_padding(data: Path, document_mask: bool) -> None:
    dataset = PackedDataset(data, split="train", sequence_length=32)
    batch = worst_case_batch(dataset, 4, 3, torch.device("cpu"), document_mask)
    with Loader(dataset, LoaderOptions(1, 0, 8, 4, document_mask=document_mask)) as loader:
        real = next(loader)[0]
    for name in ("tokens_BT", "targets_BT", "cu_seqlens", "positions_BT"):
        worst, usual = getattr(batch, name), getattr(real, name)
        if usual is None:
            assert worst is None
        else:
            assert worst.shape == usual.shape and worst.dtype == usual.dtype
    assert batch.num_valid == 4 * 32 and batch.num_valid_step == 3 * 4 * 32
    assert int(batch.tokens_BT.max()) < dataset.index.tokenizer.vocab_size
