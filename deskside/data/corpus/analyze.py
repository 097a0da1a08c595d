"""The first pass over the sources: count, tag, choose the validation split, and sample text for the tokenizer."""

from __future__ import annotations

import glob
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import xxhash
from pydantic import Field, NonNegativeInt, PositiveInt

from deskside.data.corpus.bad_input import BadInputLog, OnBad
from deskside.data.corpus.documents import Document, iter_documents
from deskside.data.corpus.encoder_sample import EncoderSample
from deskside.data.corpus.heldout import (
    Holdout,
    HoldoutPlanner,
    start_if_chosen,
    start_if_tails,
    text_hash,
)
from deskside.data.corpus.reader import LINE_LIMIT
from deskside.data.corpus.sources import Source
from deskside.data.encoder import EncoderInfo
from deskside.data.reading.index import MAX_TAGS, LeftOut
from deskside.data.tokenizer import spans
from deskside.utils.errors import UsageError
from deskside.utils.progress import ProgressBar

_OTHER = ("other", "")  # shared by all pairs beyond MAX_TAGS
_LABELLED = re.compile(r"(?P<lang>[A-Za-z][\w-]{1,15})=(?P<spec>.+)")
_PIECE_BYTES = 1 << 13  # of the pieces in which documents are sampled


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Options of `prepare.prepare`. Sizes are in bytes.

    field: the field or column of the text. lang_field: that of the language. lang: the language of documents without
    one. tokenizer: an existing one; None trains one with `vocab_size` tokens on a sample of up to `sample_bytes`.
    tokenizer_temperature: sets the share of each language in this sample (see `tokenizer_sample`); None keeps that of
    the text. val_sources: validation text, instead of a share of the sources; training documents with the same text are
    left out and counted. val_fraction: share of the documents for validation; see `heldout` for
    the rule and the default. on_bad: skip and count bad input, or refuse it. workers: number of processes (default: one
    per core). resume: continue a preparation in the folder, instead of replacing it. line_limit: see `sources`.
    shard_bytes: text per shard.
    """

    field: str = "text"
    lang_field: str = "lang"
    lang: str = ""
    vocab_size: int = 32768
    tokenizer_temperature: float | None = None
    tokenizer: str | Path | None = None
    val_sources: Sequence[str] = ()
    val_fraction: float | None = None
    on_bad: OnBad = "skip"
    workers: int | None = None
    resume: bool = True
    seed: int = 0
    line_limit: int = LINE_LIMIT
    shard_bytes: int = 32 << 20
    sample_bytes: int = 80 << 20
    quiet: bool = False


@dataclass(frozen=True, order=True)
class _Piece:
    """A piece of a document in the sample, ordered by `rank`: the negative hash, so that a heap pops the highest hash.

    number: of the piece in its document. key: `text_hash` of the document. end: where the piece ends in the document.
    start_if_tails, start_if_chosen: where validation would start in the document, see `heldout`.
    """

    rank: int
    number: int
    key: bytes
    data: bytes = field(compare=False)
    end: int = field(compare=False)
    start_if_tails: int = field(compare=False)
    start_if_chosen: int = field(compare=False)


@dataclass
class TextSampler:
    """Samples about `limit` bytes of text: the pieces with the lowest hashes, whatever the order of the documents.

    Long documents are sampled in pieces, so that a corpus of few books is sampled evenly as well.
    """

    limit: int
    seed: int
    size: int = 0  # bytes of the sample
    _heap: list[_Piece] = field(default_factory=list)
    _ceiling: int = 1 << 64  # above the hashes of all pieces that may be added

    def add(self, text: bytes, key: bytes, if_tails: int, if_chosen: int) -> None:
        """Add the pieces of a document.

        key: its `text_hash`. if_tails, if_chosen: where validation would start in it, from `start_if_tails` and
        `start_if_chosen`. Which of the two applies is known only after the whole corpus has been read.
        """
        for i, (start, end) in enumerate(spans(text, _PIECE_BYTES)):
            piece_hash = xxhash.xxh3_64_intdigest(key + i.to_bytes(8, "little"), seed=self.seed + 1)
            if piece_hash >= self._ceiling:
                continue
            heapq.heappush(self._heap, _Piece(-piece_hash, i, key, text[start:end], end, if_tails, if_chosen))
            self.size += end - start
            while self.size > self.limit and len(self._heap) > 1:
                dropped = heapq.heappop(self._heap)
                self.size -= len(dropped.data)
                # Never add a higher hash than a dropped one, so that the order of documents is irrelevant.
                self._ceiling = -dropped.rank

    def texts(self, holdout: Holdout) -> Iterator[str]:
        """Yield the sample in a fixed order, without validation text."""
        for piece in sorted(self._heap, reverse=True):
            if not (holdout.tails or holdout.is_chosen(piece.key)):
                yield piece.data.decode("utf-8")
                continue
            cut = piece.start_if_tails if holdout.tails else piece.start_if_chosen
            train_bytes = cut - (piece.end - len(piece.data))
            if train_bytes > 0:
                yield piece.data[:train_bytes].decode("utf-8")


@dataclass
class Analysis:
    """The result of the first pass, saved in prepare.json, so that a resumed preparation need not repeat the pass.

    text_bytes: size of the training sources' text, including what becomes validation. val_text_bytes: size of the
    validation sources' text. tags: (source, language) pairs. encoder: chosen after the pass, for its sample.
    """

    documents: PositiveInt
    text_bytes: PositiveInt
    val_text_bytes: NonNegativeInt
    tags: list[tuple[str, str]]
    bad_input: dict[str, dict[str, LeftOut]]
    ignored_files: LeftOut | Annotated[dict[str, Any], Field(max_length=0)]
    holdout: Holdout = field(default_factory=Holdout)
    encoder: EncoderInfo | None = None


@dataclass
class Splitter:
    """Splits each document of the training sources into training and validation text, and counts `duplicates`."""

    holdout: Holdout
    held_out: frozenset[bytes] = frozenset()  # hashes of the texts of the validation sources
    duplicates: int = 0  # training documents that are also in the validation sources

    def divide(self, text: bytes) -> tuple[bytes, bytes]:
        """Return the training and the validation text of a document. Both are b"" for a duplicate, which is counted."""
        key = text_hash(text)
        if key in self.held_out:
            self.duplicates += 1
            return b"", b""
        cut = self.holdout.validation_start(text, key)
        return text[:cut], text[cut:]


def analyze(
    sources: list[Source],
    val_sources: list[Source],
    options: CorpusOptions,
    sampler_of: Callable[[str], TextSampler] | None,
    encoder_sample: EncoderSample,
) -> Analysis:
    """Read all sources once, fill the samples, and return the counts and the rule for the split.

    sampler_of: returns the sampler of a document in the given language; None if no tokenizer is trained. Raises
    UsageError if there is nothing to train on, or for bad input if `on_bad` is "refuse".
    """
    logs = {"train": BadInputLog(options.on_bad), "val": BadInputLog(options.on_bad)}
    tags: dict[tuple[str, str], int] = {}
    held_out, val_text_bytes = read_validation_texts(
        val_sources, logs["val"], options, (tags, encoder_sample)
    )
    if val_sources and not held_out:
        raise UsageError(
            f"the validation sources hold no document {logs['val'].why_nothing_is_usable('they are empty')}."
        )
    documents = text_bytes = 0
    planner = HoldoutPlanner(options.seed, 0 if held_out else options.val_fraction)
    with ProgressBar("read", None, "MB", quiet=options.quiet) as bar:
        for document in documents_of(sources, logs["train"], options):
            add_tag(tags, document.source, document.lang)
            pair = (document.source, document.lang)
            source, lang = pair if pair in tags else _OTHER
            key, text = text_hash(document.data), document.data
            documents += 1
            text_bytes += len(text)
            bar.advance(len(text) / 1e6)
            encoder_sample.add((source, lang), key, text)
            if key in held_out:
                continue
            planner.add(text, key, (("lang", lang), ("source", source), ("file", document.group)))
            if sampler_of is not None:
                if_tails = start_if_tails(text, options.val_fraction) if planner.few else len(text)
                sampler_of(document.lang).add(text, key, if_tails, start_if_chosen(text))
    if documents == 0:
        raise UsageError(
            f"the sources hold no document {logs['train'].why_nothing_is_usable('they are empty')}."
        )
    if planner.documents == 0:
        raise UsageError("every training document is also in the validation sources.")
    try:
        holdout = planner.plan()
    except UsageError as error:  # there is too little text, perhaps because of what could not be used
        left_out = f" Not used: {logs['train'].summary()}." if logs["train"].total else ""
        raise UsageError(f"{error}{left_out}") from None
    ignored = [name for source in (*sources, *val_sources) for name in source.ignored]
    return Analysis(
        documents=documents,
        text_bytes=text_bytes,
        val_text_bytes=val_text_bytes,
        tags=list(tags),
        bad_input={split: log.as_dict() for split, log in logs.items() if log.total},
        ignored_files={"count": len(ignored), "first": ignored[:5]} if ignored else {},
        holdout=holdout,
    )


def read_validation_texts(
    val_sources: list[Source],
    log: BadInputLog,
    options: CorpusOptions,
    first_pass: tuple[dict[tuple[str, str], int], EncoderSample] | None = None,
) -> tuple[frozenset[bytes], int]:
    """Return the hashes and the total size in bytes of the validation texts.

    first_pass: tags and a sample, to which those of the validation texts are added.
    """
    keys, size = set(), 0
    for document in documents_of(val_sources, log, options):
        key = text_hash(document.data)
        keys.add(key)
        size += len(document.data)
        if first_pass is not None:
            tags, encoder_sample = first_pass
            add_tag(tags, document.source, document.lang)
            encoder_sample.add((document.source, document.lang), key, document.data)
    return frozenset(keys), size


def labelled_source(spec: str) -> Source:
    """Resolve a spec string, or one with a language before it such as hi=hindi.txt. Raises as `Source.parse`.

    Existing paths are never split at the equals sign, and neither are patterns that match one (year=2024/*.jsonl).
    """
    labelled = _LABELLED.fullmatch(spec)
    if labelled is None or Path(spec).exists() or glob.glob(spec, recursive=True):
        return Source.parse(spec)
    return replace(Source.parse(labelled["spec"]), lang=labelled["lang"])


def documents_of(sources: Iterable[Source], log: BadInputLog, options: CorpusOptions) -> Iterator[Document]:
    """Yield the documents of all sources in order, as `iter_documents`, each with a language if one is known."""
    for source in sources:
        for document in iter_documents(
            source,
            log,
            text_field=options.field,
            lang_field=options.lang_field,
            line_limit=options.line_limit,
        ):
            document.lang = document.lang or source.lang or options.lang
            yield document


def add_tag(tags: dict[tuple[str, str], int], source: str, lang: str) -> int:
    """Return the number of a (source, lang) pair, adding it if it is new. Pairs beyond MAX_TAGS share one number."""
    pair = (source, lang)
    if pair not in tags and len(tags) >= MAX_TAGS:
        pair = _OTHER
    return tags.setdefault(pair, len(tags))
