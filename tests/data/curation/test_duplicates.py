"""Which document is kept of each set of duplicates, compared with a search over all pairs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.curation.duplicates import Duplicates, find_duplicates
from deskside.data.curation.near_duplicates import MINIMA


def duplicates(texts: list[tuple[int, int]], removed: set[int], similarity: float | None) -> Duplicates:
    """Return the duplicates among documents (family, variant).

    Variants of a family agree in 96 to 127 of 128 minima, families in none. Family 0 has no words.
    """
    count = len(texts)
    hashes = np.array([[family, variant] for family, variant in texts], np.uint64).reshape(count, 2)
    minima = np.array([[family * 1000 + i for i in range(MINIMA)] for family, _ in texts], np.uint16)
    minima = minima.reshape(count, MINIMA)
    for i, (_, variant) in enumerate(texts):
        minima[i, : 16 * variant] += np.uint16(500 + variant)
    present = np.array([i not in removed for i in range(count)], np.bool_)
    has_words = np.array([family > 0 for family, _ in texts], np.bool_)
    return find_duplicates(hashes, minima, present, has_words, similarity)


def by_pairs(texts: list[tuple[int, int]], removed: set[int], similarity: float | None) -> list[int]:
    """Return the index of the kept document of each, -1 for one that is kept or that a filter removed."""
    kept: list[int] = []
    result = [-1] * len(texts)
    for i, (family, variant) in enumerate(texts):
        if i in removed:
            continue
        same = [j for j in range(i) if j not in removed and texts[j] == texts[i]]
        if same:
            result[i] = result[same[0]] if result[same[0]] >= 0 else same[0]
            continue
        near = []
        if similarity is not None and family:
            near = [
                (MINIMA - 16 * max(variant, texts[j][1]), -j)
                for j in kept
                if texts[j][0] == family and MINIMA - 16 * max(variant, texts[j][1]) >= similarity * MINIMA
            ]
        if near:
            result[i] = -max(near)[1]
        else:
            kept.append(i)
    return result


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=14),
    st.sets(st.integers(0, 13), max_size=4),
    st.sampled_from([None, 0.7, 0.8]),
)
@settings(deadline=None, max_examples=150)
def test_duplicates_are_those_of_a_search_over_all_pairs(
    texts: list[tuple[int, int]], removed: set[int], similarity: float | None
) -> None:
    found = duplicates(texts, removed, similarity)
    assert found.kept.tolist() == by_pairs(texts, removed, similarity)
    for i, other in enumerate(found.kept.tolist()):
        assert found.is_exact[i] == (other >= 0 and texts[other] == texts[i])


def test_no_document_is_present() -> None:
    found = duplicates([(1, 0), (1, 0)], {0, 1}, 0.7)
    assert found.kept.tolist() == [-1, -1] and not found.is_exact.any()
