"""The first pass over the sources: count, tag, decide the validation split, and sample text for the tokenizer.

Which documents are validation is decided by a keyed hash of their text, so the answer does not depend on the order of
the sources, stays the same when sources are added, and sends copies of one document to the same side. A corpus of one
document gives its tail instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import xxhash
from pydantic import Field, NonNegativeInt, PositiveInt

from deskside.data.progress import Progress
from deskside.data.shards import MAX_TAGS, LeftOut
from deskside.data.sources import BadInputLog, Document, OnBad, Source, iter_documents
from deskside.data.tokenizer import split_long
from deskside.errors import UsageError

DEFAULT_FRACTION = 0.005
_TAIL_SHARE, _TAIL_LIMIT = 0.1, 1_000_000  # of one document: its last tenth, at most a million characters


def text_hash(text: str) -> bytes:
    """128 bits that stand for a document's text; white space at its ends does not count."""
    return xxhash.xxh3_128_digest(text.strip().encode("utf-8"))


@dataclass
class Sampler:
    """Keeps at most `limit` bytes of text, chosen by a keyed hash, whatever the order of arrival.

    Long documents are sampled in pieces, so that a corpus of few books is sampled as well.
    """

    limit: int
    seed: int
    _heap: list[tuple[int, int, bytes, str, int]] = field(default_factory=list)
    held: int = 0
    _ceiling: int = 1 << 64

    def add(self, text: str, key: bytes) -> None:
        for i, piece in enumerate(split_long(text, 1 << 13)):
            rank = xxhash.xxh3_64_intdigest(key + i.to_bytes(8, "little"), seed=self.seed + 1)
            if rank >= self._ceiling:
                continue
            size = len(piece.encode("utf-8"))
            heapq.heappush(self._heap, (-rank, i, key, piece, size))
            self.held += size
            while self.held > self.limit and len(self._heap) > 1:
                dropped = heapq.heappop(self._heap)
                self.held -= dropped[4]
                # Nothing above it comes in later, so that the order of arrival does not matter.
                self._ceiling = -dropped[0]

    def texts(self, leave_out: bytes | None = None) -> Iterator[str]:
        """The sample in a fixed order, without the pieces of one document."""
        for _, _, key, piece, _ in sorted(self._heap, reverse=True):
            if key != leave_out:
                yield piece


@dataclass
class Scan:
    """What the first pass found. Kept in prepare.json, so that a resumed preparation need not look again.

    `text_bytes` is of the training sources with what becomes validation, `val_text_bytes` of the validation sources.
    `tail_chars` is above 0 where a single document gives its tail. `forced_val` is the document (its hash) that is
    validation because the fraction caught none.
    """

    documents: PositiveInt
    text_bytes: PositiveInt
    val_text_bytes: NonNegativeInt
    tail_chars: NonNegativeInt
    forced_val: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None
    tags: list[tuple[str, str]]
    bad_input: dict[str, dict[str, LeftOut]]
    ignored_files: LeftOut | Annotated[dict[str, Any], Field(max_length=0)]


@dataclass
class Splitter:
    """Says for each document of the training sources which part is trained on and which is validation."""

    seed: int
    fraction: float
    tail_chars: int = 0
    forced: bytes | None = None
    held_out: frozenset[bytes] = frozenset()  # texts of the validation sources
    duplicates: int = 0

    def divide(self, text: str) -> tuple[str, str]:
        """(training text, validation text), either may be "". Counts training copies of validation sources."""
        if self.tail_chars:
            cut = tail_cut(text, self.tail_chars)
            return text[:cut], text[cut:]
        key = text_hash(text)
        if key in self.held_out:
            self.duplicates += 1
            return "", ""
        if key == self.forced or is_validation(key, self.seed, self.fraction):
            return "", text
        return text, ""


def split_fraction(fraction: float | None, held_out: frozenset[bytes]) -> float:
    """The share of documents that becomes validation: none where there are validation sources."""
    if held_out:
        return 0.0
    return DEFAULT_FRACTION if fraction is None else fraction


def is_validation(key: bytes, seed: int, fraction: float) -> bool:
    return xxhash.xxh3_64_intdigest(key, seed=seed) < fraction * 2.0**64


def tail_cut(text: str, tail_chars: int) -> int:
    """Where the tail of about `tail_chars` begins: after a line's end, else after a space, else right there."""
    at = max(0, len(text) - tail_chars)
    for mark in ("\n", " "):
        found = text.find(mark, at, at + max(1, tail_chars // 2))
        if found >= 0:
            return found + 1
    return at


def scan(
    sources: list[Source],
    val_sources: list[Source],
    *,
    text_field: str,
    fraction: float | None,
    seed: int,
    on_bad: OnBad,
    sampler: Sampler | None,
    quiet: bool,
) -> tuple[Scan, Sampler | None]:
    """Reads everything once. Returns what it found, and the sampler filled with training text only.

    Raises:
        UsageError: nothing to train on, or bad input while `on_bad` is "refuse".
    """
    logs = {"train": BadInputLog(on_bad), "val": BadInputLog(on_bad)}
    tags: dict[tuple[str, str], int] = {}
    held_out, val_text_bytes = validation_texts(val_sources, logs["val"], text_field, tags)
    if val_sources and not held_out:
        raise UsageError(f"the validation sources hold no document {_reasons(logs['val'])}.")
    share = split_fraction(fraction, held_out)
    documents = text_bytes = chosen = 0
    smallest: tuple[int, bytes] | None = None
    first: tuple[str, bytes] | None = None
    with Progress("read", None, "MB", quiet=quiet) as bar:
        for document in documents_of(sources, logs["train"], text_field):
            note_tag(tags, document)
            key = text_hash(document.text)
            size = len(document.text.encode("utf-8"))
            documents += 1
            text_bytes += size
            bar.advance(size / 1e6)
            first = (document.text, key) if documents == 1 else None
            if key in held_out:
                continue
            if is_validation(key, seed, share):
                chosen += 1
                continue
            rank = xxhash.xxh3_64_intdigest(key, seed=seed)
            if smallest is None or rank < smallest[0]:
                smallest = (rank, key)
            if sampler is not None:
                sampler.add(document.text, key)
    if documents == 0:
        raise UsageError(f"the sources hold no document {_reasons(logs['train'])}.")
    tail, forced = 0, None
    wants_validation = not held_out and share > 0
    if first is not None:
        if first[1] in held_out:
            raise UsageError("the only training document also stands in the validation sources.")
        train_text = first[0]
        if wants_validation:
            tail = _tail_length(train_text, fraction)
            train_text = train_text[: tail_cut(train_text, tail)]
        if sampler is not None:
            sampler = Sampler(sampler.limit, sampler.seed)
            sampler.add(train_text, first[1])
    elif wants_validation and chosen == 0 and smallest is not None:
        forced = smallest[1]
    found = Scan(
        documents=documents,
        text_bytes=text_bytes,
        val_text_bytes=val_text_bytes,
        tail_chars=tail,
        forced_val=forced.hex() if forced else None,
        tags=list(tags),
        bad_input={split: log.as_dict() for split, log in logs.items() if log.total},
        ignored_files=_ignored([*sources, *val_sources]),
    )
    return found, sampler


def _tail_length(text: str, fraction: float | None) -> int:
    length = min(_TAIL_SHARE * len(text), _TAIL_LIMIT) if fraction is None else fraction * len(text)
    cut = tail_cut(text, int(length))
    if not text[cut:].strip() or not text[:cut].strip():
        raise UsageError(
            f"the only document ({len(text)} characters) is too short to cut a validation tail from it. "
            "Give more text, a larger --val-fraction, or --val SOURCE."
        )
    return int(length)


def validation_texts(
    val_sources: list[Source],
    log: BadInputLog,
    text_field: str,
    tags: dict[tuple[str, str], int] | None = None,
) -> tuple[frozenset[bytes], int]:
    """Hashes of all texts of the validation sources, and their bytes together. With `tags`, their tags are added."""
    keys, size = set(), 0
    for document in documents_of(val_sources, log, text_field):
        keys.add(text_hash(document.text))
        size += len(document.text.encode("utf-8"))
        if tags is not None:
            note_tag(tags, document)
    return frozenset(keys), size


def documents_of(sources: Iterable[Source], log: BadInputLog, text_field: str) -> Iterator[Document]:
    for source in sources:
        yield from iter_documents(source, log, text_field=text_field)


def note_tag(tags: dict[tuple[str, str], int], document: Document) -> int:
    """The number of a document's (source, lang) pair; pairs beyond the limit share one."""
    pair = (document.source, document.lang)
    if pair not in tags and len(tags) >= MAX_TAGS:
        pair = ("other", "")
    return tags.setdefault(pair, len(tags))


def _reasons(log: BadInputLog) -> str:
    if not log.total:
        return "(they are empty)"
    first = "; ".join(f"{n} x {reason}, first {log.examples[reason][0]}" for reason, n in log.counts.items())
    return f"that can be used ({first})"


def _ignored(sources: list[Source]) -> dict[str, Any]:
    names = [name for source in sources for name in source.ignored]
    return {"count": len(names), "first": names[:5]} if names else {}
