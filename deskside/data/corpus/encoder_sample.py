"""Pieces of text from every source and language, on which encoding libraries are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from deskside.data.reading.index import MAX_TAGS

_PIECE_BYTES = 4096
_PIECES = 256  # in all; 1 MB, which `tokenizers` encodes in a quarter of a second. More only for more pairs
_OTHER = ("other sources", "")  # shared by all pairs beyond MAX_TAGS: a source may be the URL of one document

Pair = tuple[str, str]  # source and language


@dataclass
class EncoderSample:
    """A sample with the same number of pieces for every pair of source and language, if they have as many documents.

    It holds pieces of the documents with the lowest hashes, so it comes from the whole corpus in any order. All pairs
    beyond the first MAX_TAGS count as one.
    """

    _kept: dict[Pair, list[tuple[bytes, bytes]]] = field(default_factory=dict)  # hashes and pieces
    _ceiling: dict[Pair, bytes] = field(default_factory=dict)  # above the hashes of pieces that may be added

    def add(self, pair: Pair, key: bytes, text: bytes) -> None:
        """Add a piece of a document in UTF-8. key: its `text_hash`."""
        if pair not in self._kept and len(self._kept) >= MAX_TAGS:
            pair = _OTHER
        kept = self._kept.get(pair)
        if kept is None:
            kept = self._kept[pair] = []
        elif key >= self._ceiling.get(pair, b"\xff" * len(key)):
            return
        start = int.from_bytes(key[-8:], "little") % max(1, len(text) - _PIECE_BYTES)
        kept.append((key, text[start : start + _PIECE_BYTES]))
        if len(kept) >= 2 * self._limit:
            self._trim(pair)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield each piece after a name for its source and language."""
        for pair in list(self._kept):
            self._trim(pair)
            name = " ".join(part for part in ("a text", *pair) if part)
            for _, piece in self._kept[pair]:
                # A piece may begin and end inside of a character.
                yield name, piece.decode("utf-8", "ignore")

    @property
    def _limit(self) -> int:
        """Number of pieces of each pair."""
        return max(1, _PIECES // len(self._kept))

    def _trim(self, pair: Pair) -> None:
        kept = sorted(self._kept[pair])[: self._limit]
        self._kept[pair], self._ceiling[pair] = kept, kept[-1][0]
