"""Baselines on the validation text: its bits when compressed by gzip, and by token frequencies (unigrams)."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deskside.data import tokenizer as bpe
from deskside.data.reading import shards
from deskside.data.reading.index import DatasetIndex, SplitInfo
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.data.reading.verify import raise_if_damaged
from deskside.utils.files import write_atomically

TRAIN_COUNTS = "train-counts.npy"  # token counts of the training split


class GzipMeter:
    """Measures the size of concatenated texts that are compressed as one gzip file at level 9."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(9, wbits=31)
        self._size = 0

    def add(self, text: bytes) -> None:
        """Append a text, given as UTF-8."""
        self._size += len(self._stream.compress(text))

    def bits(self) -> int:
        """Finish the file and return its size in bits. Nothing can be added afterwards."""
        return 8 * (self._size + len(self._stream.flush()))


def unigram_bits(train: NDArray[np.int64], val: NDArray[np.int64], eos_id: int) -> float:
    """Return the bits of the validation tokens, coded by their frequency in training with add-one smoothing.

    train, val: token counts of shape [vocab]. The end-of-text token has no text and is left out of both.
    """
    train, val = train.copy(), val.copy()
    train[eos_id] = val[eos_id] = 0
    bits = np.log2(train.sum() + len(train) - 1) - np.log2(train + 1)
    return float((val * bits).sum())


def token_counts(out: Path, split: SplitInfo, dtype: str, vocab_size: int) -> NDArray[np.int64]:
    """Return the number of occurrences of each token in a split, shape [vocab]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in split.shards:
        tokens = shards.open_tokens(out, shard, dtype)
        for start in range(0, len(tokens), 1 << 20):  # in parts, because bincount needs eight bytes per token
            counts += np.bincount(tokens[start : start + (1 << 20)], minlength=vocab_size)
    return counts


def write_train_counts(directory: Path, counts: NDArray[np.int64]) -> None:
    """Save the token counts of the training split. Raises as `write_atomically`."""
    write_atomically(
        directory / TRAIN_COUNTS, lambda file: np.save(file, counts.astype("<i8"), allow_pickle=False)
    )


def read_train_counts(directory: Path, index: DatasetIndex) -> NDArray[np.int64] | None:
    """Return what `write_train_counts` wrote, or None without a file. Raises RunError for a damaged file."""
    path = directory / TRAIN_COUNTS
    if not path.is_file():
        return None
    try:
        counts: NDArray[np.int64] = np.load(path, allow_pickle=False)
        sound = counts.shape == (index.tokenizer.vocab_size,) and counts.sum() == index.splits["train"].tokens
    except (ValueError, EOFError):
        sound = False
    if not sound:
        raise_if_damaged(directory, {TRAIN_COUNTS: "is damaged"})
    return counts


def baselines_of_rows(dataset: PackedDataset, numbers: NDArray[np.int64]) -> dict[str, float | None]:
    """Return the gzip and unigram bits per byte of the text in some rows of a validation split.

    They are comparable with a model that was evaluated on these rows only. numbers: of the rows, see
    `PackedDataset.rows_by_number`. unigram_bpb is None for data without training token counts.
    """
    tokenizer = bpe.load(dataset.directory)
    texts, eos_id = bpe.token_texts(tokenizer), dataset.index.tokenizer.eos_id
    gzip, size = GzipMeter(), 0
    counts = np.zeros(dataset.index.tokenizer.vocab_size, dtype=np.int64)
    for start in range(0, len(numbers), 256):
        targets = dataset.rows_by_number(numbers[start : start + 256]).targets.ravel()
        tokens = targets[targets != IGNORE]
        counts += np.bincount(tokens, minlength=len(counts))
        text = b"".join([texts[token] for token in tokens.tolist()])
        gzip.add(text)
        size += len(text)
    train = read_train_counts(dataset.directory, dataset.index)
    unigram = None if train is None else unigram_bits(train, counts, eos_id) / size
    return {"gzip_bpb": gzip.bits() / size, "unigram_bpb": unigram}
