"""A prepared data set on disk: flat token files, their document tables, and one index.

    DIR/index.json               everything below, counted and with checksums
    DIR/tokenizer.json           the tokenizer that made the tokens (and tokenizer_config.json)
    DIR/train-00000.bin          tokens, little-endian uint16 or uint32, nothing else
    DIR/train-00000.idx.npy      one record per document: where it starts, and its tag
    DIR/val-00000.bin ...        the same for validation

A shard is `E text E text ... E`: every document begins with the end-of-text token E, and one E closes the shard. So the
E that begins the next document is the target of a document's last token, and every token of a document has a target.

Conversations (`data.chat`) have one more file, DIR/train-00000.mask.bin, a byte per token: 1 where an assistant has to
learn the token. Their shards are `text text ... E`: a conversation begins with its first token, as a chat does.

Files are written under a temporary name, flushed to the disk and renamed: under its final name a file is whole.
Checksums are XXH3-128 (xxhash), which runs at memory speed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator
from typing_extensions import TypedDict

from deskside.config.base import DATA_NOUNS, Part, first_problem
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint, replace_atomically, sync, write_error
from deskside.utils.parsing import json_value

SCHEMA_VERSION = 1
INDEX = "index.json"
STAMP = ".verified.json"
TEMPORARY_SUFFIX = ".deskside-tmp"  # unique to this program, so such files may be deleted
DOCUMENT = np.dtype([("start", "<i8"), ("tag", "<u2")])
_PART = 1 << 20  # tokens per lookup, because the lengths need twice the memory of the tokens
MAX_TAGS = 1000  # distinct (source, lang) pairs; further ones are counted together as "other"


Dtype = Literal["uint16", "uint32"]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # in the data set's own folder


class LeftOut(TypedDict):
    """The number of items left out for one reason, and the first places."""

    count: int
    first: list[str]


class TagInfo(Part):
    source: str
    lang: str


class TagCount(Part):
    documents: PositiveInt
    tokens: PositiveInt


class ShardInfo(Part):
    """One shard. tokens: number of entries in the file. key: a checksum of its source texts.

    mask: the file that marks learned tokens, for conversations only.
    """

    file: FileName
    table: FileName
    tokens: PositiveInt
    documents: PositiveInt
    text_bytes: PositiveInt
    token_text_bytes: NonNegativeInt
    checksum: str
    table_checksum: str
    key: str
    tags: dict[NonNegativeInt, TagCount]
    mask: FileName | None = None
    mask_checksum: str | None = None


class SplitInfo(Part):
    """A split. The two baselines are in bits per byte of text, for the validation split only.

    token_text_bytes: the text that the tokens decode to; equal to `text_bytes` unless a foreign tokenizer
    normalizes the text.
    """

    tokens: PositiveInt
    documents: PositiveInt
    text_bytes: PositiveInt
    token_text_bytes: NonNegativeInt
    shards: Annotated[list[ShardInfo], Field(min_length=1)]
    gzip_bpb: NonNegativeFloat | None = None
    unigram_bpb: NonNegativeFloat | None = None

    def counts_by_tag(self) -> dict[int, tuple[int, int]]:
        """Return the documents and tokens of each tag, most tokens first."""
        counts: dict[int, tuple[int, int]] = {}
        for shard in self.shards:
            for tag, count in shard.tags.items():
                documents, tokens = counts.get(tag, (0, 0))
                counts[tag] = (documents + count.documents, tokens + count.tokens)
        return dict(sorted(counts.items(), key=lambda item: -item[1][1]))


class TokenizerInfo(Part):
    checksum: str
    vocab_size: PositiveInt
    eos: str
    eos_id: NonNegativeInt


class ChatInfo(Part):
    """Facts about conversations: end-of-turn token, learned tokens by split, and how many teach only the last turn."""

    turn_end: NonNegativeInt | None
    learnt_tokens: dict[str, NonNegativeInt]
    last_turn_only: NonNegativeInt


class DatasetIndex(Part):
    """The content of index.json. Raises pydantic.ValidationError if it is inconsistent."""

    schema_version: int
    dtype: Dtype
    tokenizer: TokenizerInfo
    tags: list[TagInfo]
    splits: dict[str, SplitInfo]
    bad_input: dict[str, dict[str, LeftOut]]
    ignored_files: LeftOut | Annotated[dict[str, Any], Field(max_length=0)]
    duplicates_of_validation: NonNegativeInt
    arguments: dict[str, Any]
    chat: ChatInfo | None = None

    @model_validator(mode="after")
    def _agrees(self) -> DatasetIndex:
        if "train" not in self.splits:
            raise ValueError("splits: train is missing")
        if self.tokenizer.eos_id >= self.tokenizer.vocab_size or self.dtype != dtype_for(
            self.tokenizer.vocab_size
        ):
            raise ValueError("tokenizer: vocab_size, eos_id and dtype do not belong together")
        for name, split in self.splits.items():
            if max((tag for shard in split.shards for tag in shard.tags), default=0) >= len(self.tags):
                raise ValueError(f"splits.{name}: a shard has a tag that is not in tags")
            for what in ("tokens", "documents", "text_bytes"):
                if getattr(split, what) != sum(getattr(shard, what) for shard in split.shards):
                    raise ValueError(f"splits.{name}.{what}: is not the sum over its shards")
        return self


@dataclass
class EncodedDocument:
    """A tokenized document. mask: 1 for learned tokens, in shards of conversations only."""

    tokens: NDArray[Any]
    tag: int
    mask: NDArray[np.uint8] | None = None


def dtype_for(vocab_size: int) -> Dtype:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file as a whole or not at all. Raises RunError when it cannot be written."""
    with (
        replace_atomically(path, path.with_name(path.name + TEMPORARY_SUFFIX)) as temporary,
        temporary.open("wb") as file,
    ):
        write(file)


def clear_temporary(directory: Path) -> None:
    """Delete the leftovers of an interrupted `write_file`."""
    for path in directory.glob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def write_shard(
    directory: Path,
    name: str,
    documents: Sequence[EncodedDocument],
    *,
    eos_id: int,
    dtype: str,
    text_bytes: int,
    lengths: NDArray[np.uint32],
    key: str,
) -> ShardInfo:
    """Write `name`.bin and `name`.idx.npy (and `name`.mask.bin) under temporary names, which `publish` removes.

    So a shard's name can be recorded before a file has that name. lengths: bytes per token, shape [vocab]. Raises
    as `write_file`.
    """
    lead = int(documents[0].mask is None)
    sizes = np.array([len(d.tokens) + lead for d in documents], dtype=np.int64)
    table = np.zeros(len(documents), dtype=DOCUMENT)
    table["start"] = np.cumsum(sizes) - sizes
    table["tag"] = [d.tag for d in documents]
    tokens = np.empty(int(sizes.sum()) + 1, dtype=np.dtype(dtype).newbyteorder("<"))
    for start, document in zip(table["start"].tolist(), documents, strict=True):
        tokens[start] = eos_id
        tokens[start + lead : start + lead + len(document.tokens)] = document.tokens
    tokens[-1] = eos_id
    paths = [directory / f"{name}{suffix}{TEMPORARY_SUFFIX}" for suffix in (".bin", ".idx.npy", ".mask.bin")]
    learnt = [d.mask for d in documents if d.mask is not None]
    if learnt:
        mask = np.concatenate([*learnt, np.zeros(1, np.uint8)])
        write_file(paths[2], lambda file: file.write(mask.data))
    write_file(paths[0], lambda file: file.write(tokens.view(np.uint8).data))
    write_file(paths[1], lambda file: np.save(file, table, allow_pickle=False))
    present, inverse = np.unique(table["tag"], return_inverse=True)
    per_tag = np.bincount(inverse, weights=sizes).astype(np.int64)
    counts = np.bincount(inverse)
    return ShardInfo(
        file=paths[0].name.removesuffix(TEMPORARY_SUFFIX),
        table=paths[1].name.removesuffix(TEMPORARY_SUFFIX),
        tokens=len(tokens),
        documents=len(documents),
        text_bytes=text_bytes,
        token_text_bytes=sum(
            int(lengths[tokens[i : i + _PART]].sum(dtype=np.int64)) for i in range(0, len(tokens), _PART)
        ),
        checksum=fingerprint(paths[0])[1],
        table_checksum=fingerprint(paths[1])[1],
        key=key,
        tags={
            int(tag): TagCount(documents=int(c), tokens=int(t))
            for tag, c, t in zip(present, counts, per_tag, strict=True)
        },
        mask=paths[2].name.removesuffix(TEMPORARY_SUFFIX) if learnt else None,
        mask_checksum=fingerprint(paths[2])[1] if learnt else None,
    )


def publish(directory: Path, info: ShardInfo) -> None:
    """Rename the files of a shard from `write_shard` to their final names. Raises as `write_file`."""
    for path in [directory / name for name in (info.file, info.table, info.mask) if name is not None]:
        try:
            os.replace(f"{path}{TEMPORARY_SUFFIX}", path)
        except OSError as error:
            raise write_error(path, error) from error
    sync(directory)


def write_index(directory: Path, index: DatasetIndex) -> None:
    text = json.dumps(index.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
    # A lone surrogate, as in a file name that is not UTF-8, becomes a JSON escape.
    write_file(directory / INDEX, lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def read_index(directory: Path) -> DatasetIndex:
    """Read and check index.json.

    Raises: UsageError: not a prepared data set, not finished, or of another kind. RunError: the index is damaged or
    of another version.
    """
    path = directory / INDEX
    if not path.is_file():
        unfinished = (directory / "prepare.json").is_file()
        remedy = (
            "its preparation is not finished: run the same `deskside data prepare` again"
            if unfinished
            else "make one with `deskside data prepare SOURCE... --out DIR`"
        )
        raise UsageError(f"{directory}: not a prepared data set (no {INDEX}); {remedy}.")
    try:
        data = json_value(path.read_bytes())
        if (kind := data.get("kind")) in DATA_NOUNS:  # written by align/prepared.py
            raise UsageError(
                f"{directory}: holds {DATA_NOUNS[kind]}, not text or conversations; give another folder."
            )
        version = data["schema_version"]
        if version != SCHEMA_VERSION:
            raise RunError(
                f"{path}: schema version {version}, wanted {SCHEMA_VERSION}. Prepare the data again."
            )
        return DatasetIndex.model_validate(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise RunError(f"{path}: damaged index ({reason}). Prepare the data again.") from error


def damaged_shards(directory: Path, split: SplitInfo, *, checksums: bool) -> dict[str, str]:
    """Return {file: problem} for shards that differ from the index. Always checks sizes, contents with `checksums`."""
    found: dict[str, str] = {}
    for shard in split.shards:
        problem = shard_problem(directory, shard, checksums=checksums)
        if problem:
            found[shard.file] = problem
    return found


def shard_problem(directory: Path, shard: ShardInfo, *, checksums: bool) -> str:
    """Return the problem with a shard, or ""."""
    binary, table = directory / shard.file, directory / shard.table
    for path in (binary, table):
        if not path.is_file():
            return f"{path.name} is missing"
    size = binary.stat().st_size
    if size not in (shard.tokens * 2, shard.tokens * 4):
        return f"{binary.name} has {size} bytes, which is not {shard.tokens} tokens"
    if table.stat().st_size < shard.documents * DOCUMENT.itemsize:
        return f"{table.name} is too short for {shard.documents} documents"
    mask = directory / shard.mask if shard.mask is not None else None
    if mask is not None and (not mask.is_file() or mask.stat().st_size != shard.tokens):
        return f"{mask.name} is missing or has not {shard.tokens} bytes"
    files = ((binary, shard.checksum), (table, shard.table_checksum), (mask, shard.mask_checksum))
    for file, wanted in files if checksums else ():
        if file is not None and fingerprint(file)[1] != wanted:
            return f"{file.name} fails its checksum"
    return ""


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`. damaged: {file: problem}."""

    directory: str
    shards: int
    gib: float
    damaged: dict[str, str]


def verify(directory: str | Path) -> VerifyReport:
    """Read every byte of a prepared data set and compare all checksums. Raises as `read_index`."""
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


def refuse_damage(directory: str | Path, damaged: dict[str, str]) -> None:
    """Raise RunError naming the first damaged file and the remedy, if there is one."""
    if damaged:
        file, problem = next(iter(damaged.items()))
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        what = problem if problem.startswith(file) else f"{file} {problem}"
        raise RunError(
            f"{directory}: {what}{more}. Run the `deskside data prepare` that made it again: only damaged shards are "
            "made again."
        )


def check(directory: Path) -> DatasetIndex:
    """Check a data set before use: sizes always; checksums once, then only if a file's size or time has changed.

    A stamp in the data set records the check; if it cannot be written, the checksums are compared each time. Raises
    as `read_index`, and RunError for a damaged shard.
    """
    index = read_index(directory)
    for split in index.splits.values():
        refuse_damage(directory, damaged_shards(directory, split, checksums=False))
    stamp = directory / STAMP
    if not (stamp.is_file() and stamp.read_bytes() == _stamp(directory).encode()):
        refuse_damage(directory, verify(directory).damaged)
    return index


def _stamp(directory: Path) -> str:
    files = sorted(
        p for p in directory.iterdir() if p.suffix in (".bin", ".npy") or p.name in (INDEX, "tokenizer.json")
    )
    return json.dumps({p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in files})


def _write_stamp(directory: Path) -> None:
    try:
        (directory / STAMP).write_bytes(_stamp(directory).encode())
    except OSError:  # a read-only data set is verified at every opening
        return


def open_tokens(directory: Path, shard: ShardInfo, dtype: str) -> NDArray[Any]:
    """Return the tokens of a shard as a read-only memory map, shape [tokens]."""
    path = directory / shard.file
    kind = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size != shard.tokens * kind.itemsize:
        refuse_damage(
            directory, {shard.file: f"has {path.stat().st_size} bytes, not {shard.tokens} {dtype} tokens"}
        )
    return np.memmap(path, dtype=kind, mode="r").view(np.ndarray)


def open_mask(directory: Path, shard: ShardInfo) -> NDArray[np.uint8] | None:
    """Return the mask of learned tokens as a read-only memory map of shape [tokens], or None if all are learned."""
    path = directory / shard.mask if shard.mask is not None else None
    return None if path is None else np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def open_table(directory: Path, shard: ShardInfo) -> NDArray[Any]:
    """Return the document table of a shard, [documents] of `start` and `tag`. Raises RunError if it is invalid."""
    try:
        table: NDArray[Any] = np.load(directory / shard.table, allow_pickle=False)
        sound = table.dtype == DOCUMENT and table.shape == (shard.documents,)
    except (ValueError, EOFError):
        sound = False
    if not sound:
        refuse_damage(directory, {shard.table: "is no document table"})
    return table
