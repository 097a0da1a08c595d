"""What a model has to beat on the validation text: gzip, and the frequency of its tokens alone. Both in bits."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deskside.data import shards
from deskside.data.shards import SplitInfo


class GzipMeter:
    """Bits of the texts written one after the other and compressed as one gzip file of level 9."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(9, wbits=31)
        self._size = 0

    def add(self, text: bytes) -> None:
        """Append a text, given as UTF-8."""
        self._size += len(self._stream.compress(text))

    def bits(self) -> int:
        """Ends the file; nothing can be added after it."""
        return 8 * (self._size + len(self._stream.flush()))


def unigram_bits(train: NDArray[np.int64], val: NDArray[np.int64], eos_id: int) -> float:
    """Bits to code the validation's text tokens by their frequency in training, add-one smoothed; counts are [vocab].

    The end-of-text token is text of no bytes and left out on both sides.
    """
    train, val = train.copy(), val.copy()
    train[eos_id] = val[eos_id] = 0
    bits = np.log2(train.sum() + len(train) - 1) - np.log2(train + 1)
    return float((val * bits).sum())


def token_counts(out: Path, split: SplitInfo, dtype: str, vocab_size: int) -> NDArray[np.int64]:
    """How often each token stands in a split, shape [vocab]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in split.shards:
        tokens = shards.open_tokens(out, shard, dtype)
        for start in range(0, len(tokens), 1 << 23):
            counts += np.bincount(tokens[start : start + (1 << 23)], minlength=vocab_size)
    return counts
