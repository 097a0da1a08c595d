"""Counts by language, compared with plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.data.reading import tags
from deskside.data.reading.tags import TagInfo, count_languages, count_tags, count_words


@given(
    st.binary(max_size=300) | st.text(" \n\tab\u0928\u00a0", max_size=300).map(str.encode), st.integers(1, 9)
)
def test_words_are_those_of_bytes_split(text: bytes, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags, "_CHUNK", chunk)
        assert count_words(text) == len(text.split())


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(1, 9), st.integers(0, 10**12), st.integers(0, 9), st.booleans()
        ),
        min_size=1,
    )
)
def test_languages_are_sums_over_their_tags(documents: list[tuple[int, int, int, int, bool]]) -> None:
    names = [TagInfo(source=str(i), lang=lang) for i, lang in enumerate(("en", "hi", "en", "", "hi"))]
    shards = []
    for second in (False, True):
        if rows := [document[:4] for document in documents if document[4] is second]:
            tag, tokens, size, words = (list(column) for column in zip(*rows, strict=True))
            shards.append(count_tags(np.array(tag, np.uint16), np.array(tokens), size, words))
    found = count_languages(shards, names)
    for column, attribute in ((1, "tokens"), (2, "text_bytes"), (3, "words")):
        expected: Counter[str] = Counter()
        for document in documents:
            expected[names[document[0]].lang or "unknown"] += int(document[column])
        assert {language: getattr(count, attribute) for language, count in found.items()} == expected
    assert list(found) == sorted(found, key=lambda language: (-found[language].tokens, language))
    for count in found.values():
        text_tokens = count.tokens - count.documents
        assert count.fertility == (text_tokens / count.words if count.words else None)
        assert count.bytes_per_token == ((count.text_bytes or 0) / text_tokens if text_tokens else None)


def test_uncounted_text_stays_unknown() -> None:
    """Covers data prepared before bytes and words were counted, and conversations."""
    counted = count_tags(np.array([0], np.uint16), np.array([5]), [20], [3])
    uncounted = count_tags(np.array([0], np.uint16), np.array([5]), None, None)
    found = count_languages([counted, uncounted], [TagInfo(source="", lang="en")])["en"]
    assert (found.tokens, found.text_bytes, found.words) == (10, None, None)
    assert found.fertility is None and found.bytes_per_token is None
