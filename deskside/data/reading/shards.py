"""The files of a prepared data set: flat token files, their document tables, and one index.

    DIR/index.json               counts and checksums of the files below
    DIR/tokenizer.json           the tokenizer that made the tokens (and tokenizer_config.json)
    DIR/train-00000.bin          tokens as little-endian uint16 or uint32, without a header
    DIR/train-00000.idx.npy      one record per document: where it starts, and its tag
    DIR/val-00000.bin ...        the same for validation

A shard is `E text E text ... E`: every document begins with the end-of-text token E, and one E closes the shard. So the
E that begins the next document is the target of a document's last token, and every token of a document has a target.

Shards of conversations (`data.chat`) have one more file, DIR/train-00000.mask.bin, with a byte per token: 1 if the
assistant has to learn the token. Such a shard is `text text ... E`: a conversation begins with its own first token.

Shards and index.json are written under temporary names, flushed to the disk and renamed, so they are always complete.
Checksums are XXH3-128 (xxhash), which runs at memory speed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskside.data.reading.index import DOCUMENT_DTYPE, ShardInfo
from deskside.data.reading.tags import count_tags
from deskside.data.reading.verify import raise_if_damaged
from deskside.utils.files import TEMPORARY_SUFFIX, fingerprint, sync, write_atomically, write_error

_LOOKUP_TOKENS = 1 << 20  # tokens per lookup of their bytes, which need more memory than the tokens


@dataclass
class EncodedDocument:
    """A tokenized document.

    tag: index of its tag. mask: 1 for tokens trained on, for conversations only. text_bytes, words: the amount of its
    text, for plain text only.
    """

    tokens: NDArray[Any]
    tag: int
    mask: NDArray[np.uint8] | None = None
    text_bytes: int | None = None
    words: int | None = None


def write_shard(
    directory: Path,
    name: str,
    documents: Sequence[EncodedDocument],
    *,
    eos_id: int,
    dtype: str,
    text_bytes: int,
    token_bytes: NDArray[np.uint32],
    key: str,
) -> ShardInfo:
    """Write `name`.bin and `name`.idx.npy (and `name`.mask.bin) under temporary names, for `publish` to rename.

    So a shard can be recorded before its files have their final names. token_bytes: bytes of text per token, shape
    [vocab]. Raises as `write_atomically`.
    """
    eos_before = int(documents[0].mask is None)  # 1 if each document begins with the end-of-text token
    sizes = np.array([len(d.tokens) + eos_before for d in documents], dtype=np.int64)
    table = np.zeros(len(documents), dtype=DOCUMENT_DTYPE)
    table["start"] = np.cumsum(sizes) - sizes
    table["tag"] = [d.tag for d in documents]
    tokens = np.empty(int(sizes.sum()) + 1, dtype=np.dtype(dtype).newbyteorder("<"))
    for start, document in zip(table["start"].tolist(), documents, strict=True):
        tokens[start] = eos_id
        first = start + eos_before
        tokens[first : first + len(document.tokens)] = document.tokens
    tokens[-1] = eos_id
    suffixes = (".bin", ".idx.npy", ".mask.bin")
    token_path, table_path, mask_path = (
        directory / f"{name}{suffix}{TEMPORARY_SUFFIX}" for suffix in suffixes
    )
    masks = [d.mask for d in documents if d.mask is not None]
    if masks:
        mask = np.concatenate([*masks, np.zeros(1, np.uint8)])
        write_atomically(mask_path, lambda file: file.write(mask.data))
    write_atomically(token_path, lambda file: file.write(tokens.view(np.uint8).data))
    write_atomically(table_path, lambda file: np.save(file, table, allow_pickle=False))
    sizes_of_text = [d.text_bytes for d in documents if d.text_bytes is not None]
    words = [d.words for d in documents if d.words is not None]
    starts = range(0, len(tokens), _LOOKUP_TOKENS)
    return ShardInfo(
        file=token_path.name.removesuffix(TEMPORARY_SUFFIX),
        table=table_path.name.removesuffix(TEMPORARY_SUFFIX),
        tokens=len(tokens),
        documents=len(documents),
        text_bytes=text_bytes,
        token_text_bytes=sum(
            int(token_bytes[tokens[i : i + _LOOKUP_TOKENS]].sum(dtype=np.int64)) for i in starts
        ),
        checksum=fingerprint(token_path)[1],
        table_checksum=fingerprint(table_path)[1],
        key=key,
        tags=count_tags(table["tag"], sizes, sizes_of_text or None, words or None),
        mask=mask_path.name.removesuffix(TEMPORARY_SUFFIX) if masks else None,
        mask_checksum=fingerprint(mask_path)[1] if masks else None,
    )


def publish(directory: Path, info: ShardInfo) -> None:
    """Rename the files that `write_shard` has written to their final names. Raises as `write_atomically`."""
    for path in [directory / name for name in (info.file, info.table, info.mask) if name is not None]:
        try:
            os.replace(f"{path}{TEMPORARY_SUFFIX}", path)
        except OSError as error:
            raise write_error(path, error) from error
    sync(directory)


def open_tokens(directory: Path, shard: ShardInfo, dtype: str) -> NDArray[Any]:
    """Return the tokens of a shard as a read-only memory map, shape [tokens]."""
    path = directory / shard.file
    kind = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size != shard.tokens * kind.itemsize:
        raise_if_damaged(
            directory, {shard.file: f"has {path.stat().st_size} bytes, not {shard.tokens} {dtype} tokens"}
        )
    return np.memmap(path, dtype=kind, mode="r").view(np.ndarray)


def open_mask(directory: Path, shard: ShardInfo) -> NDArray[np.uint8] | None:
    """Return the mask of tokens trained on as a read-only memory map, shape [tokens], or None if it is all of them."""
    path = directory / shard.mask if shard.mask is not None else None
    return None if path is None else np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def open_table(directory: Path, shard: ShardInfo) -> NDArray[Any]:
    """Return the document table of a shard, shape [documents], with fields `start` and `tag`.

    Raises RunError if it is invalid.
    """
    try:
        table: NDArray[Any] = np.load(directory / shard.table, allow_pickle=False)
        sound = table.dtype == DOCUMENT_DTYPE and table.shape == (shard.documents,)
    except (ValueError, EOFError):
        sound = False
    if not sound:
        raise_if_damaged(directory, {shard.table: "is not a document table"})
    return table
