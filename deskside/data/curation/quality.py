"""Quality filters of Gopher, C4 and FineWeb, on whole documents, for any script.

Sources: Gopher (Rae et al. 2021, arXiv 2112.11446, appendix A.1), C4 (Raffel et al. 2019, arXiv 1910.10683, section
2.2) and FineWeb (Penedo et al. 2024, arXiv 2406.17557, section 3.6). The limits are theirs. What differs, and why:

- Words are those of `words`. The maximum mean length, 10, does not count combining marks, because with them words
  of Malayalam are longer on average. The minimum, 3, counts them, because without them words of Hindi are shorter. In
  scripts without spaces the length is not limited.
- Ends of sentences are those of all scripts, such as the danda, with closing quotes and brackets after them.
- The two stop words of English that Gopher wants are only looked for in documents that are English.
- Gopher's maximum of 100,000 words would remove books and is left out, as are its limits for duplicate paragraphs,
  which consist of duplicate lines.
- C4 removes lines; here a document is removed as a whole, by C4's rules for pages.

By default, only text that repeats itself is removed. The other rules were made for pages of the English web: they also
remove short documents, poems, dialogue and lists, and C4's rule on curly brackets removes all text with code or
formulas.

A document of more than a million characters is measured in pieces of that size (duplicates: within a piece), and its
shares are computed from the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from deskside.data.curation.words import CLOSER, END, LETTER, Words, find_words, mix

DEFAULT_FILTERS = ("gopher-repetition",)
SHORT_LINE = 30  # characters, of FineWeb
_STOP_WORDS = "the be to of and that have with"
_BULLETS = "•‣▪◦●·*-"
_TOP = {2: 0.20, 3: 0.18, 4: 0.16}  # n -> maximum share of the most frequent n-gram
# n -> maximum share in duplicate n-grams.
_DUPLICATE = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

Sums = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Rule:
    """Limits of a statistic: sum `part` divided by sum `whole`, or `part` itself.

    strict: a value equal to a limit is outside too. only: a condition, "spaced" or "en", see `judge`.
    """

    name: str
    part: str
    whole: str | None
    low: float = -np.inf
    high: float = np.inf
    strict: bool = False
    only: str = ""


RULES: dict[str, tuple[Rule, ...]] = {
    "gopher-quality": (
        Rule("gopher: words", "words", None, low=50),
        Rule("gopher: mean word length", "length", "spaced", low=3, only="spaced"),
        Rule("gopher: mean word length without marks", "base_length", "spaced", high=10, only="spaced"),
        Rule("gopher: hash signs per word", "hashes", "words", high=0.1),
        Rule("gopher: ellipses per word", "ellipses", "words", high=0.1),
        Rule("gopher: lines that begin with a bullet", "bullet_lines", "lines", high=0.9),
        Rule("gopher: lines that end with an ellipsis", "ellipsis_lines", "lines", high=0.3),
        Rule("gopher: words with a letter", "letter_words", "words", low=0.8),
        Rule("gopher: English stop words", "stop_words", None, low=2, only="en"),
    ),
    "gopher-repetition": (
        Rule("gopher: duplicate lines", "duplicate_lines", "lines", high=0.3),
        Rule("gopher: characters in duplicate lines", "duplicate_line_characters", "characters", high=0.2),
        *(
            Rule(f"gopher: most frequent {n}-gram", f"top_{n}", "characters", high=high)
            for n, high in _TOP.items()
        ),
        *(
            Rule(f"gopher: duplicate {n}-grams", f"duplicate_{n}", "characters", high=high)
            for n, high in _DUPLICATE.items()
        ),
    ),
    "fineweb": (
        Rule("fineweb: lines that end with punctuation", "ended_lines", "lines", low=0.12, strict=True),
        Rule(
            "fineweb: characters in duplicate lines", "duplicate_line_characters", "characters", high=0.1, strict=True
        ),
        Rule("fineweb: short lines", "short_lines", "lines", high=0.67, strict=True, only="spaced"),
    ),
    "c4": (
        Rule("c4: curly brackets", "braces", None, high=0),
        Rule("c4: lorem ipsum", "lorem", None, high=0),
        Rule("c4: sentences", "sentences", None, low=3),
    ),
}  # fmt: skip
RULES["gopher"] = RULES["gopher-quality"] + RULES["gopher-repetition"]
FILTERS = tuple(RULES)


@cache
def _hashes_of(words: str) -> NDArray[np.uint64]:
    return find_words([words]).hash


def measure(words: Words, filters: Sequence[str] = FILTERS) -> Sums:
    """Return the statistics that the filters use, each of shape [texts]; those of a document's pieces can be added."""
    sums = {
        "characters": words.characters.astype(np.float64),
        "words": words.per_text(words.text),
        "spaced": words.per_text(words.text[~words.single]),
    }
    for statistics in dict.fromkeys(one for name in filters for one in _STATISTICS[name]):
        sums |= statistics(words)
    return sums


def _lengths(words: Words) -> Sums:
    """Return the lengths of words, and the numbers of those with a letter and of English stop words."""
    return {
        "length": words.per_text(words.text, np.where(words.single, 0, words.end - words.start)),
        "base_length": words.per_text(words.text, np.where(words.single, 0, words.length)),
        "letter_words": words.per_text(words.text, words.letters),
        "stop_words": words.per_text(words.text, np.isin(words.hash, _hashes_of(_STOP_WORDS))),
    }


def _characters(words: Words) -> Sums:
    """Return the numbers of hash signs, ellipses, curly brackets, placeholder texts and ends of sentences."""
    code = words.code
    text_end = np.cumsum(words.characters + 1)

    def count(at: NDArray[np.int64]) -> NDArray[np.float64]:
        return words.per_text(np.searchsorted(text_end, at, side="right"))

    dots = np.flatnonzero(code == ord("."))
    three = dots[:-2][(dots[1:-1] == dots[:-2] + 1) & (dots[2:] == dots[:-2] + 2)]
    ends = np.flatnonzero(words.kind & END)
    lorem = _hashes_of("lorem ipsum")
    at = np.flatnonzero(words.hash[:-1] == lorem[0])
    return {
        "hashes": count(np.flatnonzero(code == ord("#"))),
        "ellipses": count(np.flatnonzero(code == ord("…"))) + count(three[np.diff(three, prepend=-9) > 1]),
        "braces": count(np.flatnonzero(code == ord("{"))),
        "lorem": words.per_text(words.text[at[words.hash[at + 1] == lorem[1]]]),
        # An end of a sentence is not followed by a letter, as in a decimal number or an address, or by another end.
        "sentences": count(ends[(words.kind[np.minimum(ends + 1, len(code) - 1)] & (END | LETTER)) == 0]),
    }


def _lines(words: Words) -> Sums:
    text, first, last = words.line_text, words.line_first, words.line_last
    end = last
    for _ in range(3):  # skip closing quotes and brackets
        closing = (words.kind[end] & CLOSER) != 0
        end = np.where(closing & (end > first), end - 1, end)
    final = words.code[last]
    dots = (final == ord(".")) & (last >= first + 2)
    for back in (1, 2):
        dots &= words.code[np.maximum(last - back, 0)] == ord(".")
    key = words.line_hash ^ mix(text.astype(np.uint64))
    order = np.argsort(key, kind="stable")
    repeated = np.zeros(len(key), np.bool_)
    repeated[order[1:]] = key[order[1:]] == key[order[:-1]]
    return {
        "lines": words.per_text(text),
        "ended_lines": words.per_text(text, (words.kind[end] & END) != 0),
        "short_lines": words.per_text(text, words.line_length < SHORT_LINE),
        "bullet_lines": words.per_text(
            text, np.isin(words.code[first], [ord(bullet) for bullet in _BULLETS])
        ),
        "ellipsis_lines": words.per_text(text, (final == ord("…")) | dots),
        "duplicate_lines": words.per_text(text, repeated),
        "duplicate_line_characters": words.per_text(text, np.where(repeated, words.line_length, 0)),
    }


def _ngrams(words: Words) -> Sums:
    """Return the characters of the most frequent n-gram, and those of words in later copies of an n-gram.

    A repeated n-gram begins with a repeated (n-1)-gram, so that only these are looked at again for the next n.
    """
    sums: Sums = {}
    size = words.end - words.start
    at = np.arange(len(words.hash))
    for n in range(2, 11):
        at, hashes = words.ngrams(n, at)
        order, new = _sorted_with_index(hashes ^ words.text_key[at])
        at = at[order]
        begin = np.flatnonzero(new)
        count = np.diff(begin, append=len(at))
        repeated = np.repeat(count > 1, count)
        if n in _TOP:
            first = at[begin[count > 1]]
            characters = (words.end[first + n - 1] - words.start[first]) * count[count > 1]
            top = np.zeros(words.texts)
            np.maximum.at(top, words.text[first], characters)
            sums[f"top_{n}"] = top
        else:
            later = at[~new & repeated]
            inside = np.zeros(len(words.hash), np.bool_)
            for offset in range(n):
                inside[later + offset] = True
            covered = np.flatnonzero(inside)
            sums[f"duplicate_{n}"] = words.per_text(words.text[covered], size[covered])
        at = np.sort(at[repeated])
    return sums


def _sorted_with_index(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the order that sorts hashes, equal ones by their place, and which of the sorted ones differ from the last.

    The place replaces the lowest bits of the hash, and the numbers are sorted: NumPy sorts numbers several times faster
    than it finds their order. A block of text has 45,000 hashes. In one of 300,000 blocks, two of them
    have the same remaining 48 bits by chance.
    """
    mask = np.uint64((1 << len(hashes).bit_length()) - 1)
    keys = np.sort((hashes & ~mask) | np.arange(len(hashes), dtype=np.uint64))
    new = np.ones(len(keys), np.bool_)
    new[1:] = (keys[1:] ^ keys[:-1]) > mask
    return (keys & mask).astype(np.int64), new


_STATISTICS: dict[str, tuple[Callable[[Words], Sums], ...]] = {
    "gopher-quality": (_lengths, _characters, _lines),
    "gopher-repetition": (_lines, _ngrams),
    "gopher": (_lengths, _characters, _lines, _ngrams),
    "fineweb": (_lines,),
    "c4": (_characters,),
}


def judge(sums: Sums, english: NDArray[np.bool_], filters: Sequence[str]) -> list[tuple[str, str] | None]:
    """Return for each document the first rule that removes it, with its value and limit, or None.

    english: which documents are known to be English, for the rule on stop words.
    """
    verdicts: list[tuple[str, str] | None] = [None] * len(english)
    conditions = {
        "": np.ones(len(english), np.bool_),
        "en": english,
        "spaced": sums["spaced"] > 0.5 * sums["words"],
    }
    for rule in (rule for name in filters for rule in RULES[name]):
        value = sums[rule.part]
        if rule.whole is not None:
            whole = sums[rule.whole]
            value = np.divide(value, whole, out=np.zeros_like(value), where=whole > 0)
        low = value <= rule.low if rule.strict else value < rule.low
        high = value >= rule.high if rule.strict else value > rule.high
        for i in np.flatnonzero((low | high) & conditions[rule.only]).tolist():
            if verdicts[i] is None:
                side, limit = ("at least", rule.low) if low[i] else ("at most", rule.high)
                side = {"at least": "more than", "at most": "less than"}[side] if rule.strict else side
                verdicts[i] = rule.name, f"{value[i]:.4g}, {side} {limit:g} is kept"
    return verdicts
