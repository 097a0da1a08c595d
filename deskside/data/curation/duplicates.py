"""Find what each duplicate document repeats: exact ones by a hash of the text, then near-duplicates by signature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deskside.data.curation.near_duplicates import duplicates_of


@dataclass(frozen=True)
class Duplicates:
    """The duplicates among documents. Both arrays have the shape [documents].

    kept: the index of the kept document that a document duplicates, or -1. is_exact: whether they have the same text.
    """

    kept: NDArray[np.int64]
    is_exact: NDArray[np.bool_]


def find_duplicates(
    hashes: NDArray[np.uint64],
    minima: NDArray[np.uint16],
    present: NDArray[np.bool_],
    has_words: NDArray[np.bool_],
    similarity: float | None,
) -> Duplicates:
    """Return the duplicates among the documents that are `present`; the others are neither removed nor kept.

    Args:
        hashes: Of the texts, shape [documents, 2].
        minima: Signatures, shape [documents, MINIMA].
        present: Shape [documents].
        has_words: Shape [documents]. A document without words is no near-duplicate.
        similarity: From this value on, documents count as near-duplicates; None keeps these.
    """
    own = np.arange(len(present))
    remaining = np.flatnonzero(present)
    _, first, group = np.unique(
        np.ascontiguousarray(hashes[remaining]).view("V16").ravel(), return_index=True, return_inverse=True
    )
    original = own.copy()  # the first document with the same text
    original[remaining] = remaining[first[group]]
    kept = np.where(original < own, original, -1)
    if similarity is not None:
        near = duplicates_of(minima, present & (kept < 0) & has_words, similarity)
        # The first of several equal documents may itself be a near-duplicate of another, which is the one kept.
        kept = np.where(near[original] >= 0, near[original], kept)
    # A copy of a near-duplicate does not have the text of the kept document.
    return Duplicates(kept, (kept >= 0) & (kept == original))
