"""What runs in a tokenising process: one shard's texts in, its files and its description out."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deskside.data import shards, tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass
class Job:
    """The texts of one shard, with a tag each. `key` is a checksum of them, `text_bytes` their size in UTF-8."""

    split: str
    name: str
    texts: list[str]
    tags: list[int]
    text_bytes: int
    key: str


@dataclass
class _Tools:
    directory: Path
    eos_id: int
    dtype: str
    tokenizer: Tokenizer
    lengths: NDArray[np.uint16]


_tools: _Tools | None = None  # set by start_worker: one per process, as a process pool wants it


def start_worker(directory: str, eos_id: int, dtype: str) -> None:
    """Loads the tokenizer of the data set under way. In a worker process it also makes Ctrl-C end it at once."""
    global _tools
    if parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what happened; a worker need not
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    coder = tokenizer.load(directory)
    _tools = _Tools(Path(directory), eos_id, dtype, coder, tokenizer.token_bytes(coder))


def make_shard(job: Job) -> shards.ShardInfo:
    """Tokenises and writes one shard.

    Raises:
        RunError: the disk is full or cannot be written.
    """
    if _tools is None:
        raise RuntimeError("start_worker has not been called in this process")
    documents = [
        shards.EncodedDocument(tokenizer.encode(_tools.tokenizer, text), tag)
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
