"""Words and lines of many texts at once, as NumPy arrays: what all filters and signatures are computed from.

A word is a run of letters, combining marks and digits, in lower case. Combining marks belong to it, because Indic vowel
signs are marks. In scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan) each letter with its
marks counts as a word.

Words, word n-grams and lines are compared by 64-bit polynomial hashes. With the prefix sums P[i] = sum of v[j] B^j over
j < i (modulo 2^64), the hash of v[a:b] is (P[b] - P[a]) B^-a for any a and b, so that no text is copied or looped over.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskside.utils.splitmix import MULTIPLIER_1, MULTIPLIER_2, derive_seed

PIECE = 1 << 20  # characters of a text that are analyzed at once; the arrays take about 150 bytes for each
_BASE = derive_seed(0, "polynomial hash") | 1  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)

# Bits of a character's class.
WORD, MARK, LETTER, SINGLE, END, SPACE, NEWLINE, CLOSER = (1 << bit for bit in range(8))
_TABLE = 0x32000  # above this there are only rare ideographs, private use and tags
_UNSPACED = (
    (0x0E00, 0x0FFF),  # Thai, Lao, Tibetan
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x9FFF),  # Chinese characters
    (0x20000, _TABLE - 1),
)
# Ends of sentences: Latin, Greek, Armenian, Arabic, Indic (danda), Ethiopic, Khmer, Chinese and Japanese, full width.
_ENDS = ".!?\u2026\u037e\u0589\u061f\u06d4\u0964\u0965\u1362\u1367\u17d4\u17d5\u3002\uff01\uff0e\uff1f\uff61"
_JOINERS = "\u200c\u200d"  # inside words of Indic scripts and Persian

Array = NDArray[Any]


@cache
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Return the class and the lower case of every character below _TABLE."""
    kind, lower = np.zeros(_TABLE, np.uint8), np.arange(_TABLE, dtype=np.uint32)
    for code in range(_TABLE):
        character = chr(code)
        category = unicodedata.category(character)
        if category[0] in "LMN":
            kind[code] = WORD | (LETTER if category[0] != "N" else 0) | (MARK if category[0] == "M" else 0)
            small = character.lower()
            if len(small) == 1:
                lower[code] = ord(small)
        elif category in ("Pe", "Pf") or character in "\"'*_":
            kind[code] = CLOSER
        elif character.isspace():
            kind[code] = SPACE
    for first, last in _UNSPACED:
        part = kind[first : last + 1]
        part[(part & LETTER) != 0] |= SINGLE
    for characters, bits in ((_ENDS, END), (_JOINERS, WORD | MARK), ("\n", SPACE | NEWLINE)):
        kind[[ord(character) for character in characters]] |= bits
    return kind, lower


@cache
def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return B^i and B^-i modulo 2^64, both of shape [count]."""
    result = []
    for base in (_BASE, _INVERSE):
        powers = np.full(count, base, np.uint64)
        powers[0] = 1
        result.append(np.cumprod(powers))
    return result[0], result[1]


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the SplitMix64 finalizer of each number: polynomial hashes of short sequences have regular low bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return x ^ (x >> np.uint64(31))


class Hashes:
    """Hashes of all spans of a sequence of 64-bit values."""

    def __init__(self, values: NDArray[np.uint64]) -> None:
        size = 1 << max(10, len(values).bit_length())  # few different sizes, whose powers are kept
        powers, self._inverse = _powers(size)
        self._sums = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(values * powers[: len(values)], out=self._sums[1:])

    def spans(self, start: Array, end: Array) -> NDArray[np.uint64]:
        """Return the mixed hash of values[start:end] for every pair of the two arrays."""
        return mix((self._sums[end] - self._sums[start]) * self._inverse[start])


@dataclass
class Words:
    """The words and lines of `texts` texts.

    Per word: text (the text it is in), start and end (in `code`), hash, length (letters and digits without marks),
    letters (has a letter), single (is a letter of a script without spaces). first_word: index of each text's first
    word, shape [texts + 1]. characters: of each text. code: the code points of all texts, one after another.
    Per line that is not blank: line_text, line_hash, line_length (from its first to its last visible character),
    line_first, line_last (positions of these in `code`).
    """

    texts: int
    characters: NDArray[np.int64]
    code: NDArray[np.uint32]
    kind: NDArray[np.uint8]
    text: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    hash: NDArray[np.uint64]
    length: NDArray[np.int64]
    letters: NDArray[np.bool_]
    single: NDArray[np.bool_]
    first_word: NDArray[np.int64]
    line_text: NDArray[np.int64]
    line_hash: NDArray[np.uint64]
    line_length: NDArray[np.int64]
    line_first: NDArray[np.int64]
    line_last: NDArray[np.int64]

    def ngrams(
        self, n: int, at: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the first word and the hash of every n-gram that lies in one text. at: only those that begin here."""
        start = np.arange(len(self.hash)) if at is None else at
        start = start[start + n <= self.first_word[self.text[start] + 1]]
        return start, self.spans(start, start + n)

    def spans(self, start: Array, end: Array) -> NDArray[np.uint64]:
        """Return the hash of the words start to end (exclusive), for every pair."""
        if not hasattr(self, "_hashes"):
            self._hashes = Hashes(self.hash)
        return self._hashes.spans(start, end)

    @cached_property
    def text_key(self) -> NDArray[np.uint64]:
        """Random number of each word's text. It tells different texts with equal hashes apart."""
        return mix(self.text.astype(np.uint64))

    def phrase(self, first: int, n: int) -> str:
        """Return the text from a word to the end of the n-th."""
        return self.code[self.start[first] : self.end[first + n - 1]].tobytes().decode("utf-32-le")

    def per_text(self, of: NDArray[np.int64], values: Array | None = None) -> NDArray[np.float64]:
        """Return the sum of `values` (default: the count) in each text; `of` is the text of each value."""
        return np.bincount(of, weights=values, minlength=self.texts).astype(np.float64)


def find_words(texts: Sequence[str]) -> Words:
    """Return the words and lines of texts of together at most a few million characters."""
    joined = "\n".join([*texts, ""])  # a line break after every text, so that words and lines end there
    code = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
    sizes = np.array([len(text) for text in texts], np.int64)
    text_start = np.concatenate(([0], np.cumsum(sizes + 1)))
    kinds, lower_case = _tables()
    rare = code >= _TABLE
    index = np.where(rare, 0x4E00, code) if rare.any() else code  # classified as Chinese characters
    kind = kinds[index]
    lower = lower_case[index]
    if rare.any():
        lower = np.where(rare, code, lower)
    hashes = Hashes(lower.astype(np.uint64) + np.uint64(1))

    is_word = (kind & WORD) != 0
    single = (kind & SINGLE) != 0
    begins = is_word.copy()
    begins[1:] &= ~is_word[:-1]
    if single.any():
        edge = single.copy()
        edge[1:] |= single[:-1]
        begins |= is_word & edge & ((kind & MARK) == 0)
    start = np.flatnonzero(begins)
    ends = is_word.copy()
    ends[:-1] &= ~is_word[1:] | begins[1:]
    end = np.flatnonzero(ends) + 1
    first_word = np.searchsorted(start, text_start)
    text = np.repeat(np.arange(len(texts)), np.diff(first_word))

    def counts(bit: int) -> NDArray[np.int32]:
        return np.concatenate(([0], np.cumsum((kind & bit) != 0, dtype=np.int32)))

    marks, letters = counts(MARK), counts(LETTER)
    first, last, line_text = _lines(kind, text_start)
    return Words(
        texts=len(texts),
        characters=sizes,
        code=code,
        kind=kind,
        text=text,
        start=start,
        end=end,
        hash=hashes.spans(start, end),
        length=(end - start) - (marks[end] - marks[start]).astype(np.int64),
        letters=letters[end] > letters[start],
        single=single[start],
        first_word=first_word,
        line_text=line_text,
        line_hash=hashes.spans(first, last + 1),
        line_length=last + 1 - first,
        line_first=first,
        line_last=last,
    )


def _lines(kind: NDArray[np.uint8], text_start: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Return the first and last visible character of each line that is not blank, and the text that it is in."""
    visible = np.flatnonzero((kind & SPACE) == 0)
    breaks = np.flatnonzero(kind & NEWLINE)
    before = np.searchsorted(visible, breaks)  # number of visible characters before each line break
    begin = np.concatenate(([0], before[:-1])) if len(before) else before
    full = before > begin
    first, last = visible[begin[full]], visible[before[full] - 1]
    return first, last, np.searchsorted(text_start, first, side="right") - 1


def pieces(text: str) -> list[str]:
    """Cut a long text into pieces of at most PIECE characters, at white space where there is any."""
    result = []
    while len(text) > PIECE:
        cut = max(text.rfind("\n", PIECE // 2, PIECE), text.rfind(" ", PIECE // 2, PIECE)) + 1 or PIECE
        result.append(text[:cut])
        text = text[cut:]
    return [*result, text]


def seams(parts: Sequence[str], count: int) -> list[str]:
    """Return, for each place where `pieces` cut a text, the `count` words before and after it as one text.

    A sequence of up to count + 1 words that lies across a cut is in one of them, even if it lies across several cuts.
    """
    result, before = [], ""
    for part, following in pairwise(parts):
        before = _edge(before + part, count, last=True)
        result.append(before + _edge(following, count, last=False))
    return result


def _edge(text: str, count: int, last: bool) -> str:
    """Return the beginning of a text, or its end if `last`: `count` whole words and a cut one, or the whole text.

    A word may be cut at both ends of what is returned: at the inner one by this function, at the outer one by `pieces`.
    """
    size = 16 * count
    while size < len(text):
        edge = text[-size:] if last else text[:size]
        if len(find_words([edge]).hash) > count + 1:
            return edge
        size *= 4
    return text
