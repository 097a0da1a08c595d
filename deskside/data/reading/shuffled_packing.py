"""Packing that is new in every epoch: documents in a random order, one after the other, cut at the ends of rows.

With best-fit packing (`packing`), only the order of the rows changes from epoch to epoch: a document always has the
same neighbors, the same place in its row, and the same cuts. Over many epochs of a small corpus, a model can memorize
these. Here, each epoch is a new permutation of all documents, read as one stream; row r has the tokens r T to (r + 1) T
of the stream. This is the document shuffling of slowrun (github.com/qlabs-eng/slowrun, train.py,
`doc_shuffle`). The price is that most rows cut a document, because every row but the last is full.

Every epoch has the same number of rows. So a position in the order of the data gives an epoch and a row without a look
at earlier epochs, and a run can be resumed anywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deskside.data.reading.shuffle import permute

KEPT_EPOCHS = 2  # a step may have rows of two epochs


class ShuffledPacking:
    """Rows of one component of the data. start, length: of its documents in the token stream, shape [documents].

    An epoch is named by a key, an integer. Its order takes 16 bytes per document, for the last `KEPT_EPOCHS` epochs
    that were read.
    """

    def __init__(self, start: NDArray[np.int64], length: NDArray[np.int64], sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.start, self.length = start[length > 0], length[length > 0]
        self.num_tokens = int(self.length.sum(dtype=np.int64))
        self.num_rows = -(-self.num_tokens // sequence_length)
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def row_tokens(self) -> NDArray[np.int64]:
        """Return the number of tokens in each row of an epoch, shape [rows]."""
        tokens = np.full(self.num_rows, self.sequence_length, dtype=np.int64)
        tokens[-1:] -= self.num_rows * self.sequence_length - self.num_tokens
        return tokens

    def pieces(self, row: int, key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (start, length) of the pieces of a row, in the epoch that `key` names."""
        order, ends = self._epoch(key)
        low = row * self.sequence_length
        high = min(low + self.sequence_length, self.num_tokens)
        first, last = np.searchsorted(ends, [low, high - 1], side="right").tolist()
        document, end = order[first : last + 1], ends[first : last + 1]
        begin = end - self.length[document]
        skipped = np.maximum(low - begin, 0)
        return self.start[document] + skipped, np.minimum(end, high) - begin - skipped

    def _epoch(self, key: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the documents of an epoch in its order, and where each ends in its stream, both [documents]."""
        epoch = self._epochs.get(key)
        if epoch is None:
            while len(self._epochs) >= KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            order = permute(np.arange(len(self.length)), len(self.length), key)
            epoch = order, np.cumsum(self.length[order], dtype=np.int64)
            self._epochs[key] = epoch
        return epoch


def max_pieces(packings: list[ShuffledPacking], rows: int) -> int:
    """Return an upper bound on the pieces, padding included, in `rows` consecutive rows of any order of the data.

    A row has at most two pieces that are not whole documents, or one and the padding. The whole documents have at most
    as many tokens as the rows; a document comes once in an epoch, and the rows may lie in several epochs.
    """
    lengths = [np.tile(p.length, rows // p.num_rows + 2) for p in packings]
    smallest_first = np.cumsum(np.sort(np.concatenate(lengths)), dtype=np.int64)
    tokens = rows * packings[0].sequence_length
    return min(int(np.searchsorted(smallest_first, tokens, side="right")) + 2 * rows, tokens)
