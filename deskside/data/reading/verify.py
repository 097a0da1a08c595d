"""Verification of a prepared data set: the sizes and checksums of its files are those of index.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deskside.data.reading.index import DOCUMENT_DTYPE, DatasetIndex, ShardInfo, SplitInfo, read_index
from deskside.data.reading.index_file import INDEX
from deskside.utils.errors import RunError
from deskside.utils.files import fingerprint

STAMP = ".verified.json"  # sizes and times of the files when their checksums were last verified


def damaged_shards(directory: Path, split: SplitInfo, *, checksums: bool) -> dict[str, str]:
    """Return {file: problem} for damaged shards of a split. Compares sizes, and with `checksums` the contents too."""
    damaged: dict[str, str] = {}
    for shard in split.shards:
        problem = shard_problem(directory, shard, checksums=checksums)
        if problem:
            damaged[shard.file] = problem
    return damaged


def shard_problem(directory: Path, shard: ShardInfo, *, checksums: bool) -> str:
    """Return how the files of a shard differ from the index, or "". checksums: compare the contents too."""
    binary, table = directory / shard.file, directory / shard.table
    for path in (binary, table):
        if not path.is_file():
            return f"{path.name} is missing"
    size = binary.stat().st_size
    if size not in (shard.tokens * 2, shard.tokens * 4):
        return f"{binary.name} has {size} bytes, which is not {shard.tokens} tokens"
    if table.stat().st_size < shard.documents * DOCUMENT_DTYPE.itemsize:
        return f"{table.name} is too short for {shard.documents} documents"
    mask = directory / shard.mask if shard.mask is not None else None
    if mask is not None and (not mask.is_file() or mask.stat().st_size != shard.tokens):
        return f"{mask.name} is missing or does not have {shard.tokens} bytes"
    if not checksums:
        return ""
    files = ((binary, shard.checksum), (table, shard.table_checksum), (mask, shard.mask_checksum))
    for file, expected in files:
        if file is not None and fingerprint(file)[1] != expected:
            return f"{file.name} fails its checksum"
    return ""


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`. gib: size of the tokens. damaged: {file: problem}."""

    directory: str
    shards: int
    gib: float
    damaged: dict[str, str]


def verify(directory: str | Path) -> VerifyReport:
    """Compare all checksums of a prepared data set. If they match, write the stamp. Raises as `read_index`."""
    directory = Path(directory)
    index = read_index(directory)
    damaged: dict[str, str] = {}
    for split in index.splits.values():
        damaged |= damaged_shards(directory, split, checksums=True)
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        damaged[tokenizer.name] = "is missing"
    elif fingerprint(tokenizer)[1] != index.tokenizer.checksum:
        damaged[tokenizer.name] = "fails its checksum"
    shards = [s for split in index.splits.values() for s in split.shards]
    width = np.dtype(index.dtype).itemsize
    if not damaged:
        _write_stamp(directory)
    return VerifyReport(str(directory), len(shards), sum(s.tokens for s in shards) * width / 2**30, damaged)


def raise_if_damaged(directory: str | Path, damaged: dict[str, str]) -> None:
    """Raise RunError if any file is damaged. The message has the first one, and a remedy."""
    if damaged:
        file, problem = next(iter(damaged.items()))
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        sentence = problem if problem.startswith(file) else f"{file} {problem}"
        remedy = "Remove this folder and prepare the data again."
        if (Path(directory) / "prepare.json").is_file():  # conversations have none
            remedy = "Repeat its `deskside data prepare` command: only damaged shards are made again."
        raise RunError(f"{directory}: {sentence}{more}. {remedy}")


def checked_index(directory: Path) -> DatasetIndex:
    """Check a data set before use, and return its index.

    Sizes are always compared; checksums only once, and again if the size or time of a file has changed. A stamp file in
    the data set records the check; if it cannot be written, the checksums are compared each time. Raises as
    `read_index`, and RunError for a damaged file.
    """
    index = read_index(directory)
    for split in index.splits.values():
        raise_if_damaged(directory, damaged_shards(directory, split, checksums=False))
    stamp = directory / STAMP
    if not (stamp.is_file() and stamp.read_bytes() == _stamp(directory).encode()):
        raise_if_damaged(directory, verify(directory).damaged)
    return index


def _stamp(directory: Path) -> str:
    """Return the sizes and times of the data set's files as JSON."""
    files = sorted(
        p for p in directory.iterdir() if p.suffix in (".bin", ".npy") or p.name in (INDEX, "tokenizer.json")
    )
    return json.dumps({p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in files})


def _write_stamp(directory: Path) -> None:
    try:
        (directory / STAMP).write_bytes(_stamp(directory).encode())
    except OSError:  # a read-only data set, whose checksums are compared each time
        return
