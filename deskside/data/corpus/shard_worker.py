"""Tokenization of one shard: jobs are cut from the stream of documents by the reader, and run in worker processes."""

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
    """The UTF-8 texts of one shard, with a tag each. key: a checksum of the texts. text_bytes: their size."""

    split: str
    name: str
    texts: list[bytes]
    tags: list[int]
    text_bytes: int
    key: str


class ShardCutter:
    """Collects the documents of one split until they fill a shard."""

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
        self.texts.append(text)
        self.tags.append(tag)
        self.size += len(text)
        self.digest.update(text_hash(text))
        if self.size >= self.limit:
            yield from self.rest()

    def rest(self) -> Iterator[ShardJob]:
        if self.texts:
            name = f"{self.split}-{self.number:05d}"
            yield ShardJob(self.split, name, self.texts, self.tags, self.size, self.digest.hexdigest())
            self.number += 1
            self._clear()


@dataclass
class _Tools:
    directory: Path
    eos_id: int
    dtype: str
    tokenizer: Tokenizer
    lengths: NDArray[np.uint32]


_tools: _Tools | None = None  # set by start_worker, once per process


def start_worker(directory: str, eos_id: int, dtype: str) -> None:
    """Load the tokenizer of this preparation."""
    global _tools
    coder = tokenizer.load(directory)
    _tools = _Tools(Path(directory), eos_id, dtype, coder, tokenizer.token_bytes(coder))


def make_shard(job: ShardJob) -> shards.ShardInfo:
    """Tokenize and write one shard, which `shards.publish` then renames.

    Raises RunError if it cannot be written.
    """
    if _tools is None:
        raise RuntimeError("start_worker has not been called in this process")
    documents = [
        shards.EncodedDocument(tokenizer.encode(_tools.tokenizer, text, _tools.dtype), tag)
        for text, tag in zip(job.texts, job.tags, strict=True)
    ]
    return shards.write_shard(
        _tools.directory,
        job.name,
        documents,
        eos_id=_tools.eos_id,
        dtype=_tools.dtype,
        text_bytes=job.text_bytes,
        lengths=_tools.lengths,
        key=job.key,
    )
