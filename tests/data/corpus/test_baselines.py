"""Baselines of the rows that a model was evaluated on, compared with Python's gzip and counts of the text."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deskside.data import tokenizer as bpe
from deskside.data.corpus.baselines import TRAIN_COUNTS, baselines_of_rows
from deskside.data.reading.index import read_index
from deskside.data.reading.loader import evaluated_rows
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.utils.errors import RunError


def test_all_rows_have_the_baselines_of_the_split(prepared: Path) -> None:
    dataset = PackedDataset(prepared, "val", 64)
    found = baselines_of_rows(dataset, evaluated_rows(dataset, None))
    split = dataset.index.splits["val"]
    assert found["unigram_bpb"] == pytest.approx(split.unigram_bpb, rel=1e-9)
    assert found["gzip_bpb"] == pytest.approx(split.gzip_bpb, rel=0.1)  # the rows are in another order


def test_some_rows_have_their_own(prepared: Path) -> None:
    dataset = PackedDataset(prepared, "val", 64)
    numbers = evaluated_rows(dataset, 5)
    targets = dataset.rows_by_number(numbers).targets
    tokenizer = bpe.load(prepared)
    tokens = targets[targets != IGNORE]
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode()
    found = baselines_of_rows(dataset, numbers)
    assert found["gzip_bpb"] == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text), rel=0.02)
    counts = np.load(prepared / TRAIN_COUNTS) + 1.0
    counts[dataset.index.tokenizer.eos_id] = 0
    tokens = tokens[tokens != dataset.index.tokenizer.eos_id]
    assert found["unigram_bpb"] == pytest.approx(-np.log2(counts[tokens] / counts.sum()).sum() / len(text))


def test_counts_that_are_gone_or_damaged(prepared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    numbers = np.array([0])
    (copy / TRAIN_COUNTS).unlink()  # as in data prepared by an earlier version
    assert baselines_of_rows(PackedDataset(copy, "val", 64), numbers)["unigram_bpb"] is None
    (copy / TRAIN_COUNTS).write_bytes(b"damaged")
    with pytest.raises(RunError, match=TRAIN_COUNTS):
        baselines_of_rows(PackedDataset(copy, "val", 64), numbers)


def test_bytes_of_tokens(prepared: Path) -> None:
    tokenizer: Tokenizer = bpe.load(prepared)
    texts = bpe.token_texts(tokenizer)
    assert [len(text) for text in texts] == bpe.token_bytes(tokenizer).tolist()
    for text in ("नदी पत्थर\n\t\x00\x7f\xad é", "ships 🎉"):
        assert b"".join(texts[i] for i in tokenizer.encode(text).ids) == text.encode()
    assert {text for text in texts if len(text) == 1} == {bytes([b]) for b in range(256)}
    assert read_index(prepared).tokenizer.vocab_size == len(texts)
