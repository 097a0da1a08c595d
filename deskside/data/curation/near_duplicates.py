"""Near-duplicates by MinHash (Broder 1997) and locality-sensitive hashing, with rensa's MinHash in Rust.

The similarity of two documents is the share of common word 5-grams (Jaccard). Of each document, 128 minima of hashes
are kept, 16 bits each: two documents agree in a minimum with the probability of their similarity (Li and König 2010,
arXiv 0910.3349, for the 16 bits). Documents that agree in all minima of a band are candidates; they are duplicates if
they agree in at least the wanted share of all 128. So bands decide only about time, and the standard error of the
share is at most 0.045.

A document is removed if it is a duplicate of an earlier one that is kept. So what is kept has no duplicates left, and
a chain of documents that each resemble the next does not vanish.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deskside.data.curation.words import Words, mix

SHINGLE = 5  # words, as in FineWeb
MINIMA = 128
_SEED = 1
_FOUND = 0.999  # probability that documents of exactly the wanted similarity become candidates


def signatures(words: Words) -> NDArray[np.uint32]:
    """Return the minima of each text, shape [texts, MINIMA]; the largest value everywhere for a text without words.

    A text of fewer than five words has one shingle, all its words. For a document in pieces, each minimum is the
    smallest of those of its pieces.
    """
    from rensa import RMinHash

    start, hashes = words.ngrams(SHINGLE)
    count = np.diff(words.first_word)
    few = np.flatnonzero((count > 0) & (count < SHINGLE))
    texts = np.concatenate([words.text[start], few])
    hashes = np.concatenate([hashes, words.spans(words.first_word[few], words.first_word[few + 1])])
    order = np.argsort(texts, kind="stable")
    offsets = np.searchsorted(texts[order], np.arange(words.texts + 1))
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        hashes[order], offsets.astype(np.uint64), MINIMA, _SEED
    )
    rows = np.array(matrix.to_rows(), np.uint32).reshape(words.texts, MINIMA)
    rows[count == 0] = np.iinfo(np.uint32).max
    return rows


def rows_per_band(similarity: float) -> int:
    """Return the largest number of minima per band that finds documents of this similarity with `_FOUND`."""
    fitting = [
        r for r in range(1, MINIMA + 1) if 1 - (1 - similarity**r) ** (MINIMA // r) >= _FOUND or r == 1
    ]
    return fitting[-1]


def duplicates_of(
    minima: NDArray[np.uint16], present: NDArray[np.bool_], similarity: float
) -> NDArray[np.int64]:
    """Return for each document the index of the kept document that it duplicates, or -1.

    minima: shape [documents, MINIMA]. present: documents to compare; the others are neither removed nor kept.
    Memory: about 4 bytes for each document and band, besides `minima`.
    """
    result = np.full(len(minima), -1, np.int64)
    buckets = _buckets(minima, np.flatnonzero(present), rows_per_band(similarity))
    needed = int(np.ceil(similarity * MINIMA - 1e-9))
    members: dict[int, list[int]] = {}  # of each bucket: the documents that are kept
    for document in np.flatnonzero((buckets >= 0).any(axis=1)).tolist():
        own = [bucket for bucket in buckets[document].tolist() if bucket >= 0]
        candidates = sorted({other for bucket in own for other in members.get(bucket, ())})
        if candidates:
            equal = (minima[candidates] == minima[document]).sum(axis=1)
            best = int(equal.argmax())  # of equally similar ones, the earliest
            if equal[best] >= needed:
                result[document] = candidates[best]
                continue
        for bucket in own:
            members.setdefault(bucket, []).append(document)
    return result


def _buckets(minima: NDArray[np.uint16], documents: NDArray[np.int64], rows: int) -> NDArray[np.int32]:
    """Return the bucket of each document in each band, shape [all documents, bands]; -1 if it is alone in it."""
    bands = MINIMA // rows
    result = np.full((len(minima), bands), -1, np.int32)
    used = 0
    for band in range(bands):
        key = np.zeros(len(documents), np.uint64)
        for column in range(band * rows, (band + 1) * rows):
            key = mix(key + minima[documents, column] + np.uint64(1))
        order = np.argsort(key, kind="stable")
        new = np.ones(len(order), np.bool_)
        new[1:] = key[order[1:]] != key[order[:-1]]
        number = np.cumsum(new) - 1
        shared = np.bincount(number, minlength=1)[number] > 1
        result[documents[order[shared]], band] = used + number[shared]
        used += int(number[-1]) + 1 if len(number) else 0
    return result
