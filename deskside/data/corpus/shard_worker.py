"""Tokenization in shards: the reading process groups documents into jobs, and worker processes run the jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from deskside.data import tokenizer
from deskside.data.corpus.heldout import text_hash
from deskside.data.reading import shards

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass
class ShardJob:
    """The texts of one shard, in UTF-8.

    tags: for each text, the index of its (source, language) in the data set's tags. text_bytes: total size of the
    texts. key: checksum of the texts.
    """

    split: str
    name: str
    texts: list[bytes]
    tags: list[int]
    text_bytes: int
    key: str


class ShardBatcher:
    """Groups the documents of one split into jobs of at least `shard_bytes` bytes of text; the last may be smaller."""

    def __init__(self, split: str, shard_bytes: int) -> None:
        self.split, self.limit = split, shard_bytes
        self.number = 0
        self._clear()

    def _clear(self) -> None:
        self.texts: list[bytes] = []
        self.tags: list[int] = []
        self.size = 0
        self.digest = xxhash.xxh3_128()

    def add(self, text: bytes, tag: int) -> Iterator[ShardJob]:
        """Add a document. Yields a job if it fills the shard."""
        self.texts.append(text)
        self.tags.append(tag)
        self.size += len(text)
        self.digest.update(text_hash(text))
        if self.size >= self.limit:
            yield from self.flush()

    def flush(self) -> Iterator[ShardJob]:
        """Yield a job of the documents collected so far, if any."""
        if self.texts:
            name = f"{self.split}-{self.number:05d}"
            yield ShardJob(self.split, name, self.texts, self.tags, self.size, self.digest.hexdigest())
            self.number += 1
            self._clear()


@dataclass
class _WorkerState:
    directory: Path
    eos_id: int
    dtype: str
    tokenizer: Tokenizer
    token_bytes: NDArray[np.uint32]  # shape [vocab]


_state: _WorkerState | None = None  # set by start_worker, once per process


def start_worker(directory: str, eos_id: int, dtype: str) -> None:
    """Initialize this process: load the tokenizer in `directory`, to which `make_shard` writes."""
    global _state
    coder = tokenizer.load(directory)
    _state = _WorkerState(Path(directory), eos_id, dtype, coder, tokenizer.token_bytes(coder))


def make_shard(job: ShardJob) -> shards.ShardInfo:
    """Tokenize and write one shard, under temporary names that `shards.publish` replaces by the final ones.

    Raises RunError if it cannot be written.
    """
    if _state is None:
        raise RuntimeError("start_worker has not been called in this process")
    documents = [
        shards.EncodedDocument(tokenizer.encode(_state.tokenizer, text, _state.dtype), tag)
        for text, tag in zip(job.texts, job.tags, strict=True)
    ]
    return shards.write_shard(
        _state.directory,
        job.name,
        documents,
        eos_id=_state.eos_id,
        dtype=_state.dtype,
        text_bytes=job.text_bytes,
        lengths=_state.token_bytes,
        key=job.key,
    )
