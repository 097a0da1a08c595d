"""Selection of the validation documents of a corpus.

1. A hash of each document's text, keyed by the seed, decides whether it becomes validation. The choice thus does not
   depend on the order of the sources, and copies of a document are in the same split. Without `--val-fraction`, the
   share is chosen so that validation has about 500 kB of text, but at least 0.5 % and at most 10 % of the corpus. If
   sources are added, this share can only fall, so the hash never moves a document from training to validation.
2. Each language, each source and each .jsonl or .parquet file should be represented. If the hash chose no document of
   one of them, its document with the lowest hash is added, while all additions are at most a tenth of the text. An
   empty validation split gets one document of any size.
3. A chosen document of more than two million bytes gives at most its last million bytes; the rest is trained on.
4. In a corpus of fewer than ten different documents, validation is instead the tail of every document that can be
   divided: a share of `--val-fraction`, or without it the last tenth, at most a million bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from deskside.utils.errors import UsageError

if TYPE_CHECKING:
    from deskside.data.reading.index import DatasetIndex, SplitInfo

MIN_FRACTION, MAX_FRACTION = 0.005, 0.1  # bounds of the default share of validation text
TARGET_BYTES = 500_000  # default size of the validation text, within these bounds
FEW_DOCUMENTS = 10  # in a smaller corpus, an average document is more than a tenth of the text
MAX_TAIL_BYTES = 1_000_000
MIN_VALIDATION_BYTES = 50_000  # less validation text gives a warning; docs/guides/own-text.md says so

_EDGE = 1 << 12  # bytes at each end of a text in which surrounding white space is searched first

Label = tuple[str, str]  # a stratum, such as ("lang", "hi"), ("source", "wiki") or ("file", "a.jsonl")


def text_hash(text: bytes) -> bytes:
    """Return a 128-bit hash of a UTF-8 text without surrounding white space."""
    # Decode only the two ends, because decoding and stripping a whole book would copy it. If an end is all white space,
    # strip the whole text.
    head, tail = text[:_EDGE].decode("utf-8", "ignore"), text[-_EDGE:].decode("utf-8", "ignore")
    if len(text) <= _EDGE or not head.strip() or not tail.strip():
        return xxhash.xxh3_128_digest(text.decode("utf-8").strip().encode("utf-8"))
    start = len(head[: len(head) - len(head.lstrip())].encode("utf-8"))
    end = len(text) - len(tail[len(tail.rstrip()) :].encode("utf-8"))
    return xxhash.xxh3_128_digest(memoryview(text)[start:end])


def is_validation(key: bytes, seed: int, fraction: float) -> bool:
    """Return True if a document becomes validation, with probability `fraction`. key: its `text_hash`."""
    return rank(key, seed) < fraction * 2.0**64


def rank(key: bytes, seed: int) -> int:
    """Return a document's pseudo-random rank, 0 to 2**64 - 1. The documents with the lowest ranks are validation."""
    return xxhash.xxh3_64_intdigest(key, seed=seed)


def tail_start(text: bytes, size: int) -> int:
    """Return where the last `size` bytes or fewer start: after a newline, else after a space, else at a character."""
    start = max(0, len(text) - size)
    while start < len(text) and text[start] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        start += 1
    for separator in (b"\n", b" "):
        index = text.find(separator, start, start + max(1, size // 2))
        if index >= 0:
            return index + 1
    return start


def start_if_tails(text: bytes, fraction: float | None) -> int:
    """Return where validation starts in a document if the tail of every document is validation (rule 4).

    Returns the length of the document if its tail, or the text before the tail, would be only white space.
    """
    length = min(0.1 * len(text), MAX_TAIL_BYTES) if fraction is None else fraction * len(text)
    start = tail_start(text, int(length))
    return start if text[:start].strip() and text[start:].strip() else len(text)


def start_if_chosen(text: bytes) -> int:
    """Return where validation starts in a chosen document: 0, or up to a million bytes before the end of a long one."""
    return 0 if len(text) <= 2 * MAX_TAIL_BYTES else tail_start(text, MAX_TAIL_BYTES)


@dataclass(frozen=True)
class Holdout:
    """The rule that splits one corpus into training and validation, saved in prepare.json.

    Attributes:
        share: Share of the documents that the hash chooses.
        added: Hashes of further chosen documents, in hexadecimal.
        tails: True if validation is the tail of every document instead; `share` and `added` are then not used.
        fraction: The value of `--val-fraction`; None for the default.
    """

    seed: int = 0
    share: float = 0.0
    added: list[str] = field(default_factory=list)
    tails: bool = False
    fraction: float | None = None

    def is_chosen(self, key: bytes) -> bool:
        """Return True if a document, or the tail of a long one, is validation. key: its `text_hash`."""
        return is_validation(key, self.seed, self.share) or key in self._added_keys

    @cached_property
    def _added_keys(self) -> frozenset[bytes]:
        return frozenset(map(bytes.fromhex, self.added))

    def validation_start(self, text: bytes, key: bytes) -> int:
        """Return where validation starts in a document; its length if the whole document is trained on."""
        if self.tails:
            return start_if_tails(text, self.fraction)
        return start_if_chosen(text) if self.is_chosen(key) else len(text)


class _Candidate(NamedTuple):
    """A document that may be added to validation. size: its validation text in bytes. labels: the strata it is in."""

    rank: int
    key: bytes
    size: int
    labels: tuple[Label, ...]


@dataclass
class _Stratum:
    """The documents that share a label. size: in bytes. lowest: the document with the lowest rank."""

    first_key: bytes
    size: int = 0
    has_two_texts: bool = False  # at least two documents with different texts
    lowest: _Candidate | None = None


@dataclass
class HoldoutPlanner:
    """Collects the statistics of a corpus while it is read, and chooses its `Holdout`."""

    seed: int
    fraction: float | None
    documents: int = 0
    size: int = 0
    _keys: set[bytes] = field(default_factory=set)  # distinct documents, up to FEW_DOCUMENTS
    _has_tail: bool = False  # any document added while `few` is long enough to be divided
    _strata: dict[Label, _Stratum] = field(default_factory=dict)

    @property
    def few(self) -> bool:
        """True until FEW_DOCUMENTS distinct documents have been read."""
        return len(self._keys) < FEW_DOCUMENTS

    def add(self, text: bytes, key: bytes, labels: Iterable[Label]) -> None:
        """Add a document. key: its `text_hash`. Labels with an empty value are ignored."""
        self.documents += 1
        self.size += len(text)
        if self.few:
            self._keys.add(key)
            self._has_tail = self._has_tail or start_if_tails(text, self.fraction) < len(text)
        strata = (("all", "all"), *(label for label in labels if label[1]))
        candidate = _Candidate(rank(key, self.seed), key, len(text) - start_if_chosen(text), strata)
        for label in strata:
            stratum = self._strata.get(label)
            if stratum is None:
                stratum = self._strata[label] = _Stratum(key)
            stratum.size += len(text)
            stratum.has_two_texts = stratum.has_two_texts or key != stratum.first_key
            if stratum.lowest is None or candidate.rank < stratum.lowest.rank:
                stratum.lowest = candidate

    def plan(self) -> Holdout:
        """Return the rule for the corpus. Raises UsageError if its only document is too short to be divided."""
        if self.fraction == 0 or not self.documents:
            return Holdout(self.seed, fraction=self.fraction)
        if self.few and self._has_tail:
            return Holdout(self.seed, tails=True, fraction=self.fraction)
        if len(self._keys) == 1:
            raise UsageError(
                f"the only document ({self.size // self.documents} bytes) is too short to be divided into "
                "training and validation text. Give more text, a larger --val-fraction, or --val SOURCE."
            )
        share = self.fraction
        if share is None:
            share = min(MAX_FRACTION, max(MIN_FRACTION, TARGET_BYTES / self.size))
        return Holdout(self.seed, share, self._choose_added(share), fraction=self.fraction)

    def _choose_added(self, share: float) -> list[str]:
        """Return the hashes of the documents to add so that each stratum is represented, within the budget.

        The whole corpus comes first, then languages, sources and files, larger strata first.
        """
        added: list[str] = []
        covered: set[Label] = set()
        budget = MAX_FRACTION * self.size
        kinds = ["all", "lang", "source", "file"]

        def order(item: tuple[Label, _Stratum]) -> tuple[int, int, Label]:
            label, stratum = item
            return kinds.index(label[0]), -stratum.size, label

        for label, stratum in sorted(self._strata.items(), key=order):
            assert stratum.lowest is not None
            lowest = stratum.lowest
            is_represented = lowest.rank < share * 2.0**64 or label in covered
            # A stratum of one text would have no training text left.
            if is_represented or not stratum.has_two_texts:
                continue
            # The corpus needs some validation text, whatever its size.
            if label[0] == "all" or lowest.size <= budget:
                added.append(lowest.key.hex())
                covered.update(lowest.labels)
                budget -= lowest.size
        return added


def validation_warnings(index: DatasetIndex) -> list[str]:
    """Return warnings about the validation split: too small, or without text of some language or source."""
    train, val = index.splits["train"], index.splits.get("val")
    if val is None:
        return []
    warnings = []
    # The number of documents does not count: the default share of a few hundred large files gives only some of them.
    if val.text_bytes < MIN_VALIDATION_BYTES:
        warnings.append(
            f"validation is {val.text_bytes:,} bytes in {val.documents:,} "
            f"document{'s' if val.documents != 1 else ''}: less than {MIN_VALIDATION_BYTES // 1000} kB cannot "
            "distinguish similar models. Give more text, a larger --val-fraction, or --val SOURCE"
        )
    for kind in ("lang", "source"):
        # Nothing can be held out from a source with one document, such as a file that a shell's pattern matched.
        fewest = 1 if kind == "lang" else 2
        missing = sorted(_values(index, train, kind, fewest) - _values(index, val, kind))
        if missing and _values(index, val, kind):
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            noun = "language" if kind == "lang" else "source"
            warnings.append(f"validation has no text of {noun} {', '.join(missing[:3])}{more}")
    return warnings


def _values(index: DatasetIndex, split: SplitInfo, kind: str, fewest: int = 1) -> set[str]:
    """Return the languages or sources of a split with at least `fewest` documents. kind: "lang" or "source"."""
    documents: Counter[str] = Counter()
    for tag, (number, _) in split.counts_by_tag().items():
        documents[getattr(index.tags[tag], kind)] += number
    return {value for value, number in documents.items() if value and number >= fewest}
