"""index.json: the counts and checksums of a prepared data set's files, and what they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator
from typing_extensions import TypedDict

from deskside.config.base import DATA_NOUNS, Part, first_problem
from deskside.data.encoder import EncoderInfo
from deskside.data.reading.index_file import INDEX
from deskside.data.reading.tags import LanguageCount, TagCount, TagInfo, count_languages
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_json
from deskside.utils.parsing import Unreadable, json_value

SCHEMA_VERSION = 1
DOCUMENT_DTYPE = np.dtype([("start", "<i8"), ("tag", "<u2")])  # an entry of a document table
SUMS = ("tokens", "documents", "text_bytes", "token_text_bytes")  # of a split: the sums over its shards
MAX_TAGS = 1000  # distinct (source, lang) pairs; further ones are counted together as "other"

Dtype = Literal["uint16", "uint32"]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # without a path: a file of the data set's folder


class LeftOut(TypedDict):
    """The number of items left out for one reason, and where the first of them are."""

    count: int
    first: Annotated[list[str], Field(min_length=1)]


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
        return cls(shards=shards, **{name: sum(getattr(shard, name) for shard in shards) for name in SUMS})

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
            for key in SUMS:
                if getattr(split, key) != sum(getattr(shard, key) for shard in split.shards):
                    raise ValueError(f"splits.{name}.{key}: is not the sum over its shards")
        return self


def dtype_for(vocab_size: int) -> Dtype:
    """Return the smallest dtype for token ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_index(directory: Path, index: DatasetIndex) -> None:
    """Write index.json. Raises as `write_json`."""
    write_json(directory / INDEX, index.model_dump(mode="json"), indent=1)


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
        missing = f"no {INDEX}" if directory.exists() else "there is no such folder"
        raise UsageError(f"{directory}: not a prepared data set ({missing}); {remedy}.")
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
        reason = first_problem(error) if isinstance(error, ValidationError) else _reason(error)
        raise RunError(
            f"{path}: damaged index ({reason}). Prepare the data again, in a new folder."
        ) from error


def _reason(error: Exception) -> str:
    """Return what is wrong with an index that could not be read as one."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    return f"not JSON: {error}" if isinstance(error, Unreadable) else "it is not a JSON object"
