"""The report of `deskside data prepare` about the data set that it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.data.corpus.heldout import validation_warnings
from deskside.data.reading.index import DatasetIndex


@dataclass(frozen=True)
class Report:
    """The result of `prepare.prepare`. documents, tokens, text_bytes: by split. made, kept: number of shards."""

    out: str
    vocab_size: int
    documents: dict[str, int]
    tokens: dict[str, int]
    text_bytes: dict[str, int]
    gzip_bpb: float | None
    unigram_bpb: float | None
    bad_input: dict[str, Any]
    ignored_files: Mapping[str, Any]
    duplicates_of_validation: int
    warnings: list[str]
    made: int
    kept: int
    seconds: float

    @classmethod
    def of(cls, out: Path, index: DatasetIndex, made: int, kept: int, seconds: float) -> Report:
        """Return the report on the data set with this index."""
        val, splits = index.splits.get("val"), index.splits
        return cls(
            out=str(out),
            vocab_size=index.tokenizer.vocab_size,
            documents={name: split.documents for name, split in splits.items()},
            tokens={name: split.tokens for name, split in splits.items()},
            text_bytes={name: split.text_bytes for name, split in splits.items()},
            gzip_bpb=val.gzip_bpb if val else None,
            unigram_bpb=val.unigram_bpb if val else None,
            bad_input=index.bad_input,
            ignored_files=index.ignored_files,
            duplicates_of_validation=index.duplicates_of_validation,
            warnings=validation_warnings(index),
            made=made,
            kept=kept,
            seconds=seconds,
        )
