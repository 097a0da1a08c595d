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

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator
from typing_extensions import TypedDict

from deskside.config.base import DATA_NOUNS, Part, first_problem
from deskside.data.encoder import EncoderInfo
from deskside.data.reading.tags import LanguageCount, TagCount, TagInfo, count_languages, count_tags
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import TEMPORARY_SUFFIX, fingerprint, sync, write_atomically, write_error
from deskside.utils.parsing import json_value

SCHEMA_VERSION = 1
INDEX = "index.json"
STAMP = ".verified.json"  # sizes and times of the files when their checksums were last verified
DOCUMENT_DTYPE = np.dtype([("start", "<i8"), ("tag", "<u2")])  # an entry of a document table
_LOOKUP_TOKENS = 1 << 20  # tokens per lookup of their bytes, which need more memory than the tokens
MAX_TAGS = 1000  # distinct (source, lang) pairs; further ones are counted together as "other"

Dtype = Literal["uint16", "uint32"]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # without a path: a file of the data set's folder


class LeftOut(TypedDict):
    """The number of items left out for one reason, and where the first of them are."""

    count: int
    first: list[str]


class ShardInfo(Part):
    """One shard. file, table, mask: its files; only conversations have a mask. tokens: number of entries in `file`.

    text_bytes, token_text_bytes: see `SplitInfo`. key: checksum of the source texts. tags: counts by index of the tag.
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
    """A split. text_bytes: size of its text in UTF-8; of conversations, of their messages.

    token_text_bytes: size of the text that the tokens decode to. Unless an imported tokenizer normalizes it, plain text
    has this size, too. gzip_bpb, unigram_bpb: baselines in bits per byte, for validation splits of plain text only.
    """

    tokens: PositiveInt
    documents: PositiveInt
    text_bytes: PositiveInt
    token_text_bytes: NonNegativeInt
    shards: Annotated[list[ShardInfo], Field(min_length=1)]
    gzip_bpb: NonNegativeFloat | None = None
    unigram_bpb: NonNegativeFloat | None = None

    @classmethod
    def of(cls, shards: list[ShardInfo]) -> SplitInfo:
        """Return the totals of a split of these shards, without baselines."""
        sums = ("tokens", "documents", "text_bytes", "token_text_bytes")
        return cls(shards=shards, **{name: sum(getattr(shard, name) for shard in shards) for name in sums})

    def counts_by_tag(self) -> dict[int, tuple[int, int]]:
        """Return the documents and tokens of each tag, most tokens first."""
        counts: dict[int, tuple[int, int]] = {}
        for shard in self.shards:
            for tag, count in shard.tags.items():
                documents, tokens = counts.get(tag, (0, 0))
                counts[tag] = (documents + count.documents, tokens + count.tokens)
        return dict(sorted(counts.items(), key=lambda item: -item[1][1]))

    def counts_by_language(self, tags: Sequence[TagInfo]) -> dict[str, LanguageCount]:
        """Return the amount of text in each language, most tokens first. tags: those of the data set."""
        return count_languages((shard.tags for shard in self.shards), tags)


class TokenizerInfo(Part):
    """The tokenizer of a data set. eos: the end-of-text token."""

    checksum: str
    vocab_size: PositiveInt
    eos: str
    eos_id: NonNegativeInt


class ChatInfo(Part):
    """Facts about a data set of conversations.

    turn_end: id of the end-of-turn token, or None. learnt_tokens: tokens trained on, by split. formats: conversations
    by format of their record. unlearnt_turns: the assistant's turns that are not trained on. rewritten: conversations
    in which the chat template would rewrite earlier turns. last_turn_only: only in indexes of earlier versions.
    """

    turn_end: NonNegativeInt | None
    learnt_tokens: dict[str, NonNegativeInt]
    formats: dict[str, NonNegativeInt] = Field(default_factory=dict)
    unlearnt_turns: NonNegativeInt = 0
    rewritten: NonNegativeInt = 0
    last_turn_only: NonNegativeInt = 0


class DatasetIndex(Part):
    """The content of index.json. Raises pydantic.ValidationError if it is inconsistent.

    encoder: the library that encoded the text; None for data that was prepared when there was only one.
    """

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
    encoder: EncoderInfo | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> DatasetIndex:
        if "train" not in self.splits:
            raise ValueError("splits: train is missing")
        if self.tokenizer.eos_id >= self.tokenizer.vocab_size or self.dtype != dtype_for(
            self.tokenizer.vocab_size
        ):
            raise ValueError("tokenizer: vocab_size, eos_id and dtype do not belong together")
        for name, split in self.splits.items():
            if max((tag for shard in split.shards for tag in shard.tags), default=0) >= len(self.tags):
                raise ValueError(f"splits.{name}: a shard has a tag that is not in tags")
            for key in ("tokens", "documents", "text_bytes"):
                if getattr(split, key) != sum(getattr(shard, key) for shard in split.shards):
                    raise ValueError(f"splits.{name}.{key}: is not the sum over its shards")
        return self


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


def dtype_for(vocab_size: int) -> Dtype:
    """Return the smallest dtype for token ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


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


def write_index(directory: Path, index: DatasetIndex) -> None:
    """Write index.json. Raises as `write_atomically`."""
    text = json.dumps(index.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
    # Python has a lone surrogate for each invalid byte of a file name; write it as a JSON escape.
    write_atomically(directory / INDEX, text.encode("utf-8", "backslashreplace"))


def read_index(directory: Path) -> DatasetIndex:
    """Read and check index.json.

    Raises UsageError if there is no prepared data set, or an unfinished one or one of another kind, and RunError if the
    index is damaged or has a different version.
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
                f"{path}: schema version {version}, wanted {SCHEMA_VERSION}. Prepare the data again, in a new folder."
            )
        return DatasetIndex.model_validate(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise RunError(
            f"{path}: damaged index ({reason}). Prepare the data again, in a new folder."
        ) from error


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


def check(directory: Path) -> DatasetIndex:
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
