"""Tokenization of shards: the reading process groups documents into jobs, which worker processes run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from deskside.data import tokenizer as bpe
from deskside.data.corpus.heldout import text_hash
from deskside.data.encoder import Encoder, EncoderInfo, encode, make_encoder
from deskside.data.reading import shards
from deskside.data.reading.index import ShardInfo
from deskside.data.reading.tags import count_words


@dataclass
class ShardJob:
    """The texts of one shard, in UTF-8.

    tags: index of each text's (source, language) pair in the data set's tags. text_bytes: total size of the texts.
    key: checksum of the texts.
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
        self.split, self.shard_bytes = split, shard_bytes
        self.number = 0
        self._clear()

    def _clear(self) -> None:
        self.texts: list[bytes] = []
        self.tags: list[int] = []
        self.size = 0
        self.digest = xxhash.xxh3_128()

    def add(self, text: bytes, tag: int) -> Iterator[ShardJob]:
        """Generator that adds a document, given as UTF-8, and yields a job if the document fills the shard."""
        self.texts.append(text)
        self.tags.append(tag)
        self.size += len(text)
        self.digest.update(text_hash(text))
        if self.size >= self.shard_bytes:
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
    token_bytes: NDArray[np.uint32]  # shape [vocab]
    encoder: Encoder


_state: _WorkerState | None = None  # of this process; set by start_worker


def start_worker(
    directory: Path, eos_id: int, dtype: str, token_bytes: NDArray[np.uint32], encoder: EncoderInfo
) -> None:
    """Initialize this process. directory: the folder of the tokenizer, which `make_shard` writes to."""
    global _state
    tokenizer_json = bpe.load(directory).to_str()
    _state = _WorkerState(directory, eos_id, dtype, token_bytes, make_encoder(tokenizer_json, encoder))


def make_shard(job: ShardJob) -> ShardInfo:
    """Tokenize one shard and write its files under temporary names, for `shards.publish` to rename.

    Raises RunError if the shard cannot be written.
    """
    if _state is None:
        raise RuntimeError("start_worker has not been called in this process")
    documents = [
        shards.EncodedDocument(
            encode(_state.encoder, text, _state.dtype),
            tag,
            text_bytes=len(text),
            words=count_words(text),
        )
        for text, tag in zip(job.texts, job.tags, strict=True)
    ]
    return shards.write_shard(
        _state.directory,
        job.name,
        documents,
        eos_id=_state.eos_id,
        dtype=_state.dtype,
        text_bytes=job.text_bytes,
        token_bytes=_state.token_bytes,
        key=job.key,
    )
