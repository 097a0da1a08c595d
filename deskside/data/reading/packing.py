"""Cut documents into pieces of at most a row, and pack the pieces into rows, best-fit decreasing; no token is lost.

A document of L tokens gives L // T pieces of T tokens, which are rows by themselves, and one rest. The rests are packed
longest first, each into the fullest row that still has room for it (best-fit decreasing; Johnson 1973). Ding et al.
2024 ("Fewer Truncations Improve Language Modeling") found this to fill rows almost as well as cutting everything.

Ten million pieces would be slow one by one. But lengths are integers below T, so pieces of one length and rows of one
free space are interchangeable, and whole groups move at once. While pieces of length l are placed, the fullest row with
room has the least space s >= l. After it takes a piece it is still the fullest that has room, until less than l is
left: so it takes s // l pieces in a row, and so does every other row of the same space. The result is best-fit
decreasing exactly, not an approximation (a test holds it against the piece-by-piece form).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packing:
    """Rows of pieces in compressed form: row r has the pieces row_start[r] : row_start[r + 1].

    start [pieces]: where a piece begins in the token stream. length [pieces]: its tokens. row_start: [rows + 1].
    """

    sequence_length: int
    row_start: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return len(self.row_start) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum(dtype=np.int64))

    @property
    def utilisation(self) -> float:
        """Return the filled share of all rows, 0 to 1."""
        return self.num_tokens / max(1, self.num_rows * self.sequence_length)

    def row_tokens(self) -> NDArray[np.int64]:
        """Return the tokens in each row, shape [rows]."""
        if not len(self.length):
            return np.zeros(self.num_rows, dtype=np.int64)
        return np.add.reduceat(self.length, self.row_start[:-1], dtype=np.int64)


def cut(
    start: NDArray[np.int64], length: NDArray[np.int64], sequence_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Cut documents (start, tokens) into pieces of at most a row: whole rows first, the rest last.

    Pieces are in the order of the documents. Empty documents give none.
    """
    pieces = -(-length // sequence_length)
    owner = np.repeat(np.arange(len(length)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * sequence_length
    piece_length = np.minimum(length[owner] - offset, sequence_length).astype(np.int32)
    return start[owner] + offset, piece_length


def pack(start: NDArray[np.int64], length: NDArray[np.int64], sequence_length: int) -> Packing:
    """Cut and pack documents; see the module's docstring. The result is deterministic.

    Raises ValueError for sequence_length below 1 or a negative length.
    """
    if sequence_length < 1 or (len(length) and int(length.min()) < 0):
        raise ValueError("sequence_length must be at least 1, and lengths not negative")
    piece_start, piece_length = cut(start, length, sequence_length)
    row = assign_best_fit(piece_length, sequence_length)
    order = np.argsort(row, kind="stable")
    rows = int(row.max()) + 1 if len(row) else 0
    row_start = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=row_start[1:])
    return Packing(sequence_length, row_start, piece_start[order], piece_length[order])


def assign_best_fit(length: NDArray[np.int32], capacity: int) -> NDArray[np.int64]:
    """Return the row of each piece by best-fit decreasing, shape [pieces]; every length is from 1 to capacity."""
    row_of = np.empty(len(length), dtype=np.int64)
    by_length = np.argsort(-length, kind="stable")
    counts = np.bincount(length, minlength=capacity + 1)
    rows_with: list[list[NDArray[np.int64]]] = [
        [] for _ in range(capacity)
    ]  # by free space, opened rows only
    has_rows = np.zeros(capacity + 1, dtype=bool)
    opened = at = 0

    def put_back(rows: NDArray[np.int64], space: int) -> None:
        if len(rows) and space:
            rows_with[space].append(rows)
            has_rows[space] = True

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            space = size + int(np.argmax(has_rows[size:]))
            if has_rows[space]:
                rows = rows_with[space][0] if len(rows_with[space]) == 1 else np.concatenate(rows_with[space])
                rows_with[space] = []
                has_rows[space] = False
            else:  # none has room: open as many new rows as these pieces fill
                space = capacity
                rows = np.arange(opened, opened - (-left // (capacity // size)))
                opened += len(rows)
            each = space // size
            full = min(len(rows), left // each)
            placed = full * each
            row_of[by_length[at : at + placed]] = np.repeat(rows[:full], each)
            put_back(rows[:full], space - each * size)
            at, left, rows = at + placed, left - placed, rows[full:]
            if len(rows) and left:  # fewer pieces than one more row takes
                row_of[by_length[at : at + left]] = rows[0]
                put_back(rows[:1], space - left * size)
                at, left, rows = at + left, 0, rows[1:]
            put_back(rows, space)
    return row_of
