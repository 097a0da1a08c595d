"""Word sequences of the evaluation tasks, and the documents that contain one.

A sequence is 13 words, as in GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix C). Shorter items, of at least 8
words, are looked for as a whole, where GPT-3 also uses lengths down to 8. In languages that write long words, such as
Tamil and Malayalam, 8 words say as much as 13 in English and a sentence rarely has 13: texts with at least 7.5
characters per word, spaces included, are divided into sequences of 8 words. Letter case and punctuation are ignored.

A sequence in more than ten items and more than a twentieth of a task's items belongs to the task's template, and is
left out. Documents are removed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from deskside.data.curation.words import PIECE, Words, find_words

LONGEST, SHORTEST = 13, 8  # words
LONG_WORDS = 7.5  # characters per word
_TEMPLATE_ITEMS, _TEMPLATE_SHARE = 10, 0.05
_BITS = 27  # of the index into the bitmap of first words; 16 MiB


@dataclass
class EvaluationNgrams:
    """The n-grams of evaluation items. names: of the tasks. grams: for each n, the sorted hashes and their tasks.

    too_short: number of items with fewer than SHORTEST words, for each task; they are not looked for.
    """

    names: tuple[str, ...]
    grams: dict[int, tuple[NDArray[np.uint64], NDArray[np.int32]]]
    too_short: dict[str, int]
    bitmap: NDArray[np.uint8]

    @classmethod
    def of(cls, items: Mapping[str, Sequence[str]]) -> EvaluationNgrams:
        """Return the n-grams of the items' texts, which are given for each task by its name."""
        found: dict[int, list[tuple[NDArray[np.uint64], NDArray[np.int32]]]] = {}
        anchors, too_short = [], {}
        for number, (name, texts) in enumerate(items.items()):
            per_n, short = _task_grams(texts)
            too_short[name] = short
            for n, (hashes, first) in per_n.items():
                found.setdefault(n, []).append((hashes, np.full(len(hashes), number, np.int32)))
                anchors.append(first)
        grams = {}
        for n, parts in sorted(found.items()):
            hashes, where = np.unique(np.concatenate([hashes for hashes, _ in parts]), return_index=True)
            grams[n] = hashes, np.concatenate([numbers for _, numbers in parts])[where]
        bitmap = np.zeros(1 << (_BITS - 3), np.uint8)
        for first in anchors:
            place = first >> np.uint64(64 - _BITS)
            np.bitwise_or.at(bitmap, place >> np.uint64(3), _bit(place))
        return cls(tuple(items), grams, too_short, bitmap)

    @property
    def digest(self) -> str:
        """Checksum of the n-grams."""
        digest = xxhash.xxh3_128("\n".join(self.names).encode())
        for n, (hashes, numbers) in self.grams.items():
            digest.update(f"{n}".encode() + hashes.tobytes() + numbers.tobytes())
        return digest.hexdigest()

    def find(self, words: Words) -> dict[int, tuple[str, str]]:
        """Return the texts with an n-gram of a task: {index of the text: (name of the task, the words)}."""
        if not self.grams:
            return {}
        at, first = words.ngrams(SHORTEST)
        # Almost no position passes this test, of one random access; the searches below would take ten times as long.
        place = first >> np.uint64(64 - _BITS)
        at = at[(self.bitmap[place >> np.uint64(3)] & _bit(place)) != 0]
        hits: dict[int, tuple[int, str, str]] = {}
        for n, (known, numbers) in self.grams.items():
            start, hashes = words.ngrams(n, at)
            index = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            for i in np.flatnonzero(known[index] == hashes).tolist():
                text, word = int(words.text[start[i]]), int(start[i])
                if text not in hits or word < hits[text][0]:
                    hits[text] = word, self.names[numbers[index[i]]], words.phrase(word, n)
        return {text: (name, phrase) for text, (_, name, phrase) in hits.items()}


def _bit(place: NDArray[np.uint64]) -> NDArray[np.uint8]:
    return np.left_shift(1, place & np.uint64(7), dtype=np.uint8, casting="unsafe")


def _blocks(texts: Iterable[str]) -> Iterable[list[str]]:
    """Group texts into blocks of about PIECE characters."""
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= PIECE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _task_grams(texts: Sequence[str]) -> tuple[dict[int, tuple[NDArray[np.uint64], NDArray[np.uint64]]], int]:
    """Return {n: (hashes of the n-grams, hashes of their first words)} without the template, and the short items."""
    found: dict[int, list[tuple[NDArray[np.uint64], NDArray[np.uint64]]]] = {}
    short = 0
    for block in _blocks(texts):
        words = find_words(block)
        count = np.diff(words.first_word)
        long_words = words.characters >= LONG_WORDS * np.maximum(count, 1)
        size = np.where(long_words, SHORTEST, np.clip(count, SHORTEST, LONGEST))
        short += int((count < SHORTEST).sum())
        for n in np.unique(size).tolist():
            start, hashes = words.ngrams(n, np.flatnonzero(size[words.text] == n))
            # once per item: the number of occurrences is then the number of items
            _, where = np.unique(hashes ^ words.text_key[start], return_index=True)
            found.setdefault(n, []).append((hashes[where], words.ngrams(SHORTEST, start[where])[1]))
    limit = max(_TEMPLATE_ITEMS, _TEMPLATE_SHARE * len(texts))
    result = {}
    for n, parts in found.items():
        hashes, where, items = np.unique(
            np.concatenate([hashes for hashes, _ in parts]), return_index=True, return_counts=True
        )
        first = np.concatenate([first for _, first in parts])[where]
        if (items <= limit).any():
            result[n] = hashes[items <= limit], first[items <= limit]
    return result, short
