"""Tags of documents (their source and language), and how much text there is with each tag and in each language."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from deskside.config.base import Part

UNKNOWN_LANGUAGE = UNKNOWN_SOURCE = "unknown"  # of documents without one
_WHITE_SPACE = np.isin(np.arange(256), list(b" \t\n\r\v\f"))
_CHUNK = 1 << 20  # bytes whose words are counted at a time


class TagInfo(Part):
    """The source and language of documents; "" if unknown."""

    source: str
    lang: str

    @property
    def language(self) -> str:
        """The language for tables and charts, where an unknown one has a name too."""
        return self.lang or UNKNOWN_LANGUAGE

    @property
    def source_name(self) -> str:
        """The source as a component of a mixture, where an unknown one has a name too."""
        return self.source or UNKNOWN_SOURCE


class TagCount(Part):
    """The documents and tokens with one tag in a shard, and the bytes and words of their text if they were counted."""

    documents: PositiveInt
    tokens: PositiveInt
    text_bytes: NonNegativeInt | None = None
    words: NonNegativeInt | None = None


@dataclass(frozen=True)
class LanguageCount:
    """The amount of text in one language.

    tokens: with one end-of-text token per document. text_bytes: in UTF-8. words: see `count_words`. The last two are
    None for conversations, and for data that was prepared before they were counted.
    """

    documents: int
    tokens: int
    text_bytes: int | None
    words: int | None

    @property
    def fertility(self) -> float | None:
        """Tokens of text per word."""
        return (self.tokens - self.documents) / self.words if self.words else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token of text."""
        text_tokens = self.tokens - self.documents
        return self.text_bytes / text_tokens if self.text_bytes is not None and text_tokens else None


def count_words(text: bytes) -> int:
    """Return the number of words of a text in UTF-8: parts between ASCII white space.

    This suits languages that separate words by spaces. For others, such as Chinese and Thai, the number means nothing.
    """
    words, in_word = 0, False
    data = np.frombuffer(text, dtype=np.uint8)
    for start in range(0, len(data), _CHUNK):
        is_word = ~_WHITE_SPACE[data[start : start + _CHUNK]]
        words += int(is_word[0] and not in_word) + int((is_word[1:] & ~is_word[:-1]).sum())
        in_word = bool(is_word[-1])
    return words


def count_tags(
    tags: NDArray[np.uint16],
    tokens: NDArray[np.int64],
    text_bytes: Sequence[int] | None,
    words: Sequence[int] | None,
) -> dict[int, TagCount]:
    """Return the sums over the documents with each tag. All arguments have one entry per document."""
    present, inverse = np.unique(tags, return_inverse=True)

    def sums(values: Sequence[int] | NDArray[np.int64] | None) -> list[int] | list[None]:
        if values is None:
            return [None] * len(present)
        totals = np.zeros(len(present), dtype=np.int64)
        np.add.at(totals, inverse, np.asarray(values, dtype=np.int64))
        return [int(total) for total in totals]

    columns = zip(
        present.tolist(),
        np.bincount(inverse).tolist(),
        sums(tokens),
        sums(text_bytes),
        sums(words),
        strict=True,
    )
    return {
        tag: TagCount.model_validate({"documents": d, "tokens": t, "text_bytes": b, "words": w})
        for tag, d, t, b, w in columns
    }


def count_languages(
    shards: Iterable[Mapping[int, TagCount]], tags: Sequence[TagInfo]
) -> dict[str, LanguageCount]:
    """Return the amount of text in each language, most tokens first.

    shards: the counts of each shard by index of the tag in `tags`.
    """
    counts: dict[str, list[TagCount]] = {}
    for shard in shards:
        for tag, count in shard.items():
            counts.setdefault(tags[tag].language, []).append(count)

    def total(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None

    languages = {
        language: LanguageCount(
            sum(c.documents for c in of_language),
            sum(c.tokens for c in of_language),
            total([c.text_bytes for c in of_language]),
            total([c.words for c in of_language]),
        )
        for language, of_language in counts.items()
    }
    return dict(sorted(languages.items(), key=lambda item: (-item[1].tokens, item[0])))
