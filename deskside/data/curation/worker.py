"""The work of the processes that curate: analyze the documents of a batch, and write them with their verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from deskside.data.corpus.heldout import text_hash
from deskside.data.curation import quality
from deskside.data.curation.contamination import LONGEST, EvaluationNgrams
from deskside.data.curation.language import LanguageIdentifier
from deskside.data.curation.near_duplicates import MINIMA, signatures
from deskside.data.curation.state import Sample, WrittenBatch
from deskside.data.curation.words import PIECE, find_words, pieces, seams
from deskside.utils.files import fingerprint, write_atomically

LANGUAGE, CONTAMINATED = "language", "contaminated"
EXACT, NEAR = "exact duplicate", "near duplicate"
KEPT = "kept"
_SURE = 0.65  # confidence from which a document without a label gets a language; FineWeb's limit for English
_MISLABELLED = (
    0.9  # confidence from which a label is wrong; some Marathi is taken for Sanskrit or Konkani with 0.74
)
_BLOCK = PIECE // 4  # characters analyzed at once, so that the arrays stay in the processor's cache
_SAMPLES, _SAMPLE_CHARACTERS = 3, 300


@dataclass
class Findings:
    """The results of analyzing the documents of a batch.

    hash: of the exact text, shape [documents, 2]. minima: shape [documents, MINIMA]. words: whether it has any.
    language: the identified one if it has none, "" if that is uncertain. verdict: (reason, detail) of the filter that
    removes it, or None.
    """

    hash: NDArray[np.uint64]
    minima: NDArray[np.uint16]
    words: NDArray[np.bool_]
    language: list[str]
    verdict: list[tuple[str, str] | None]


@dataclass
class _Tools:
    filters: tuple[str, ...]
    languages: tuple[str, ...]
    ngrams: EvaluationNgrams
    identifier: LanguageIdentifier = field(default_factory=LanguageIdentifier)


_tools: _Tools | None = None  # of this process; set by start_worker


def start_worker(filters: tuple[str, ...], languages: tuple[str, ...], ngrams: EvaluationNgrams) -> None:
    """Initialize this process. languages: those to keep; () for all."""
    global _tools
    _tools = _Tools(filters, languages, ngrams)


def analyse(texts: Sequence[bytes], languages: Sequence[str]) -> Findings:
    """Analyze documents in UTF-8. languages: as they are labeled, or ""."""
    assert _tools is not None, "start_worker has not been called in this process"
    count = len(texts)
    minima = np.full((count, MINIMA), np.iinfo(np.uint32).max, np.uint32)
    sums: quality.Sums = {}
    contaminated: dict[int, tuple[str, str]] = {}
    found, removed = [], []
    block: list[str] = []
    owner: list[int] = []  # the document of each piece in the block

    def flush() -> None:
        if not block:
            return
        words = find_words(block)
        np.minimum.at(minima, owner, signatures(words))
        for name, values in quality.measure(words, _tools.filters).items():
            np.add.at(sums.setdefault(name, np.zeros(count)), owner, values)
        for piece, hit in _tools.ngrams.find(words).items():
            contaminated.setdefault(owner[piece], hit)
        block.clear()
        owner.clear()

    size = 0
    for i, data in enumerate(texts):
        text = data.decode("utf-8")
        language, problem = _language(text, languages[i], _tools)
        found.append(language)
        removed.append(problem)
        parts = pieces(text)
        for hit in (
            _tools.ngrams.find(find_words(seams(parts, LONGEST - 1))).values() if len(parts) > 1 else ()
        ):
            contaminated.setdefault(i, hit)
        for piece in parts:
            if size + len(piece) > _BLOCK:
                flush()
                size = 0
            block.append(piece)
            owner.append(i)
            size += len(piece)
    flush()
    labels = [label or language for label, language in zip(languages, found, strict=True)]
    english = np.array([_tools.identifier.known(label) == "en" for label in labels], np.bool_)
    judged = quality.judge(sums, english, _tools.filters)
    verdicts = [
        problem or judged[i] or ((CONTAMINATED, ": ".join(contaminated[i])) if i in contaminated else None)
        for i, problem in enumerate(removed)
    ]
    hashes = np.frombuffer(b"".join(map(text_hash, texts)), np.uint64).reshape(count, 2)
    return Findings(hashes, minima.astype(np.uint16), sums["words"] > 0, found, verdicts)


def _language(text: str, label: str, tools: _Tools) -> tuple[str, tuple[str, str] | None]:
    """Return the identified language of a text without a label, and (reason, detail) if its language removes it."""
    known = tools.identifier.known(label)
    language, confidence = ("", 0.0)
    if known or not label:  # a label that the identifier does not know cannot be compared
        language, confidence = tools.identifier.identify(text, known)
    sure = confidence >= _SURE
    if known and confidence >= _MISLABELLED and language != known:
        return "", (LANGUAGE, f"labelled {label}, identified as {language} (confidence {confidence:.2f})")
    final = label or (language if sure else "")
    if tools.languages and final not in tools.languages and known not in tools.languages:
        return final, (LANGUAGE, f"{final or 'not identified'}, not one of {', '.join(tools.languages)}")
    return ("" if label else final), None


@dataclass
class DocumentBatch:
    """Documents of one pair of output files. number: of the batch. key: checksum of everything in it.

    first: index of its first document among all documents.
    """

    number: int
    first: int
    texts: list[bytes] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    text_bytes: int = 0
    key: str = ""


@dataclass(frozen=True)
class DocumentVerdict:
    """The reason for removing a document. kept: of a duplicate, the id of the document that is kept."""

    reason: str
    detail: str
    kept: str | None = None


def write(folder: Path, batch: DocumentBatch, verdicts: Sequence[DocumentVerdict | None]) -> WrittenBatch:
    """Write a batch's kept and removed documents, and return what was written.

    Raises RunError if a file cannot be written.
    """
    lines: dict[str, list[bytes]] = {"kept": [], "removed": []}
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    samples: dict[str, list[Sample]] = {}
    for i, verdict in enumerate(verdicts):
        text = batch.texts[i].decode("utf-8")
        record: dict[str, Any] = {
            "id": batch.origins[i],
            "source": batch.sources[i],
            "lang": batch.languages[i],
        }
        reason = KEPT
        if verdict is not None:
            reason = verdict.reason
            record |= {"reason": reason, "detail": verdict.detail}
            if verdict.kept is not None:
                record["kept"] = verdict.kept
            few = samples.setdefault(reason, [])
            if len(few) < _SAMPLES:
                few.append(Sample(**record, text=text[:_SAMPLE_CHARACTERS]))
        line = json.dumps({**record, "text": text}, ensure_ascii=False) + "\n"
        lines["kept" if verdict is None else "removed"].append(line.encode("utf-8", "replace"))
        label = json.dumps([batch.sources[i], batch.languages[i]], ensure_ascii=False)
        documents, size = counts.setdefault(reason, {}).get(label, (0, 0))
        counts[reason][label] = documents + 1, size + len(batch.texts[i])
    files = {}
    for kind, part in lines.items():
        if part:
            name = f"{kind}/{kind}-{batch.number:05d}.jsonl.zst"
            write_atomically(folder / name, zstandard.ZstdCompressor(level=3).compress(b"".join(part)))
            files[name] = fingerprint(folder / name)
    return WrittenBatch(key=batch.key, files=files, counts=counts, samples=samples)
