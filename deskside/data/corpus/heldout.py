"""Choice of the validation documents.

- A keyed hash of its text decides about each document, so the choice does not depend on the order of the sources,
and copies of one document are in the same split. Without `--val-fraction` the share is that of about 500 kB of
text, at least 0.5 % and at most 10 %. It falls when sources are added, so the hash moves no document from training
to validation.

- Every language, every source and every .jsonl or .parquet file is represented: if the hash chose no document of
one, its document with the lowest hash is added, as long as all additions are at most a tenth of the text.

- Of a document of more than two million bytes the last million is validation, and the rest is trained on.

- With fewer than ten documents, validation is the tail of each: its last tenth, at most a million bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import xxhash

from deskside.utils.errors import UsageError

if TYPE_CHECKING:
    from deskside.data.reading.shards import DatasetIndex, SplitInfo

DEFAULT_FRACTION, MOST_FRACTION = 0.005, 0.1
TARGET_BYTES = 500_000  # of validation, where a tenth of the text is as much
FEW_DOCUMENTS = 10  # below this many a whole document would be more than a tenth of the text
TAIL_LIMIT = 1_000_000
SMALL_BYTES = 50_000  # validation text below this is warned about

_EDGE = 1 << 12

Label = tuple[str, str]  # ("lang", "hi"), ("source", "wiki"), ("file", "a.jsonl")


def text_hash(text: bytes) -> bytes:
    """Return a 128-bit hash of a document's text without surrounding white space."""
    head, tail = text[:_EDGE].decode("utf-8", "ignore"), text[-_EDGE:].decode("utf-8", "ignore")
    if len(text) <= _EDGE or not head.strip() or not tail.strip():
        return xxhash.xxh3_128_digest(text.decode("utf-8").strip().encode("utf-8"))
    start = len(head[: len(head) - len(head.lstrip())].encode("utf-8"))
    end = len(text) - len(tail[len(tail.rstrip()) :].encode("utf-8"))
    return xxhash.xxh3_128_digest(memoryview(text)[start:end])


def is_validation(key: bytes, seed: int, fraction: float) -> bool:
    """Return whether the hash selects a document for validation."""
    return rank(key, seed) < fraction * 2.0**64


def rank(key: bytes, seed: int) -> int:
    """Return the position of a document from 0 to 2**64. The lowest become validation."""
    return xxhash.xxh3_64_intdigest(key, seed=seed)


def tail_cut(text: bytes, tail: int) -> int:
    """Return the start of a tail of about `tail` bytes: after a line's end, else after a space, else exactly there."""
    at = max(0, len(text) - tail)
    while at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    for mark in (b"\n", b" "):
        found = text.find(mark, at, at + max(1, tail // 2))
        if found >= 0:
            return found + 1
    return at


def few_cut(text: bytes, fraction: float | None) -> int:
    """Return the start of the tail in a corpus of few documents; the document's length if a part would be empty."""
    length = min(0.1 * len(text), TAIL_LIMIT) if fraction is None else fraction * len(text)
    cut = tail_cut(text, int(length))
    return cut if text[:cut].strip() and text[cut:].strip() else len(text)


def long_cut(text: bytes) -> int:
    """Return where validation begins in a selected document: at 0, or near the end of a long one."""
    return 0 if len(text) <= 2 * TAIL_LIMIT else tail_cut(text, TAIL_LIMIT)


@dataclass(frozen=True)
class Holdout:
    """The rule for one corpus, saved in prepare.json.

    The hash selects the share `share` of the documents, and `added` lists further hashes. With `tails`, every
    document gives its tail instead. fraction: the requested share.
    """

    seed: int = 0
    share: float = 0.0
    added: list[str] = field(default_factory=list)
    tails: bool = False
    fraction: float | None = None

    def chosen(self, key: bytes) -> bool:
        """Return whether a document, or a part of a long one, is validation."""
        return is_validation(key, self.seed, self.share) or key in self._added

    @cached_property
    def _added(self) -> frozenset[bytes]:
        return frozenset(map(bytes.fromhex, self.added))

    def cut(self, text: bytes, key: bytes) -> int:
        """Return where validation begins in a document; its length if it is trained on as a whole."""
        if self.tails:
            return few_cut(text, self.fraction)
        return long_cut(text) if self.chosen(key) else len(text)


@dataclass
class _Stratum:
    """Documents that share a label: their size, and the one with the lowest rank."""

    first: bytes
    size: int = 0
    several: bool = False
    lowest: tuple[int, bytes, int, tuple[Label, ...]] | None = None


@dataclass
class HoldoutPlanner:
    """Collects the statistics for the choice of a `Holdout` while a corpus is read once."""

    seed: int
    fraction: float | None
    documents: int = 0
    size: int = 0
    _keys: set[bytes] = field(default_factory=set)  # distinct documents, up to FEW_DOCUMENTS
    _tails: bool = False  # whether one of few documents can give a tail
    _strata: dict[Label, _Stratum] = field(default_factory=dict)

    @property
    def few(self) -> bool:
        """Return whether fewer than ten distinct documents were read so far."""
        return len(self._keys) < FEW_DOCUMENTS

    def add(self, text: bytes, key: bytes, labels: Iterable[Label]) -> None:
        """Add a document. Labels with an empty value do not count."""
        self.documents += 1
        self.size += len(text)
        if self.few:
            self._keys.add(key)
            self._tails = self._tails or few_cut(text, self.fraction) < len(text)
        found = (("all", "all"), *(label for label in labels if label[1]))
        own = (rank(key, self.seed), key, len(text) - long_cut(text), found)
        for label in found:
            stratum = self._strata.get(label)
            if stratum is None:
                stratum = self._strata[label] = _Stratum(key)
            stratum.size += len(text)
            stratum.several = stratum.several or key != stratum.first
            if stratum.lowest is None or own[0] < stratum.lowest[0]:
                stratum.lowest = own

    def plan(self) -> Holdout:
        """Return the rule. Raises UsageError if the only document is too short to be divided."""
        if self.fraction == 0 or not self.documents:
            return Holdout(self.seed, fraction=self.fraction)
        if self.few and self._tails:
            return Holdout(self.seed, tails=True, fraction=self.fraction)
        if len(self._keys) == 1:
            raise UsageError(
                f"the only document ({self.size // self.documents} bytes) is too short to cut a validation tail from "
                "it. Give more text, a larger --val-fraction, or --val SOURCE."
            )
        share = self.fraction
        if share is None:
            share = min(MOST_FRACTION, max(DEFAULT_FRACTION, TARGET_BYTES / self.size))
        return Holdout(self.seed, share, self._added(share), fraction=self.fraction)

    def _added(self, share: float) -> list[str]:
        """Return the hashes of documents for strata that `share` leaves out, the largest strata first."""
        added: list[str] = []
        covered: set[Label] = set()
        budget = MOST_FRACTION * self.size
        kinds = {kind: i for i, kind in enumerate(("all", "lang", "source", "file"))}
        for label, stratum in sorted(
            self._strata.items(), key=lambda item: (kinds[item[0][0]], -item[1].size, item[0])
        ):
            assert stratum.lowest is not None
            number, key, size, labels = stratum.lowest
            if number < share * 2.0**64 or label in covered or not stratum.several:
                continue
            if label[0] == "all" or size <= budget:
                added.append(key.hex())
                covered.update(labels)
                budget -= size
        return added


def warnings(index: DatasetIndex) -> list[str]:
    """Return warnings about a validation split: its size, or a language or source that it lacks."""
    train, val = index.splits["train"], index.splits.get("val")
    if val is None:
        return []
    found = []
    few = val.documents < FEW_DOCUMENTS <= train.documents // FEW_DOCUMENTS
    if val.text_bytes < SMALL_BYTES or few:
        found.append(
            f"validation is {val.text_bytes:,} bytes in {val.documents:,} "
            f"document{'s' if val.documents != 1 else ''}: too little to tell similar models apart. Give more text, a "
            "larger --val-fraction, or --val SOURCE"
        )
    for kind in ("lang", "source"):
        missing = sorted(_values(index, train, kind) - _values(index, val, kind))
        if missing and _values(index, val, kind):
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            what = "language" if kind == "lang" else "source"
            found.append(f"validation holds nothing of {what} {', '.join(missing[:3])}{more}")
    return found


def _values(index: DatasetIndex, split: SplitInfo, kind: str) -> set[str]:
    """Return the languages or sources of a split."""
    tags = {tag for shard in split.shards for tag in shard.tags}
    return {value for tag in tags if (value := getattr(index.tags[tag], kind))}
