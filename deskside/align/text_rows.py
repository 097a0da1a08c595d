"""Rows of prepared texts for DPO and KTO: units (a pair, or a labelled answer) that are packed whole, and their loader.

A split has texts, numbered from 0; each is a question with an answer. `TextRows` packs its units into rows, which stay
the same for the whole run, and shuffles the rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deskside.align.answers import TokenizedText, lay_out, pack_units
from deskside.align.prepared import NOUN, PreparedSplit
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.data.reading.shuffle import endless_shuffle
from deskside.train.objective import Session
from deskside.utils.errors import UsageError

Units = Sequence[NDArray[np.int64]]  # unit indices of each row


class TextRows(PreparedSplit, ABC):
    """Base class of one split of prepared texts, packed for one sequence length.

    `rows` has the unit indices of each row. Units that do not fit into a row are left out; `left_out` counts them.
    Subclasses define the texts, call `_pack` when they are constructed, and set `texts_per_row`.
    """

    rows: list[NDArray[np.int64]]
    left_out: int
    texts_per_row: int  # maximum

    def _pack(self, unit_lengths: NDArray[np.int64]) -> None:
        """Pack units of these numbers of input tokens. Raises UsageError if none fits."""
        fits = np.flatnonzero(unit_lengths <= self.sequence_length)
        self.left_out = len(unit_lengths) - len(fits)
        if not len(fits):
            noun = NOUN[self.kind]
            raise UsageError(
                f"batch.sequence_length: no {noun} of the {self.split} split fits into {self.sequence_length} "
                f"tokens; give at least {unit_lengths.min()}, the length of the shortest {noun}"
            )
        self.rows = [fits[row] for row in pack_units(unit_lengths[fits], self.sequence_length)]

    @abstractmethod
    def text(self, index: int) -> TokenizedText: ...

    @property
    @abstractmethod
    def scored_start(self) -> NDArray[np.int64]:
        """Return the offsets of each text's answer in the concatenation of all answers.

        Shape (number of texts + 1,); the last entry is the total.
        """

    @abstractmethod
    def reference_texts(self, rows: Units) -> list[list[int]]:
        """Return the indices, in rows, of the texts of these units whose reference log-probabilities are needed."""

    def tell_left_out(self, say: Callable[[str], None]) -> None:
        """Tell the user how many units do not fit."""
        if self.left_out:
            say(
                f"{self.split}: {self.left_out:,} {NOUN[self.kind]}s do not fit into a row of {self.sequence_length} "
                "tokens and are left out; a longer --batch.sequence_length includes them"
            )

    def subsample(self, count: int) -> None:
        """Keep `count` rows, evenly spaced."""
        kept = np.arange(count) * len(self.rows) // count
        self.rows = [self.rows[i] for i in kept.tolist()]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.sequence_length

    def max_boundaries(self, rows: int) -> int:
        """Return an upper bound on the number of texts and padding segments in `rows` rows."""
        return rows * (self.texts_per_row + 1)

    def rows_at(self, seed: int, positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the units of the rows at these positions of the endless shuffled order."""
        indices = endless_shuffle(positions, self.num_rows, seed, self.sequence_length)
        return [self.rows[row] for row in indices.tolist()]

    def lay_out(self, texts: Sequence[Sequence[TokenizedText]]) -> dict[str, Any]:
        """Return the fields of an `AnswerBatch` with these rows of texts, on the CPU."""
        return lay_out(texts, self.sequence_length, self.max_boundaries(len(texts)) + 1, self.pad_token)


def rows_of_rank(rows: TextRows, session: Session, max_tokens: int | None) -> Iterator[list[int]]:
    """Yield the indices of this rank's rows, one micro-batch at a time.

    The ranks share all rows, or evenly spaced ones of about `max_tokens` tokens.
    """
    count = rows.num_rows
    if max_tokens is not None:
        count = min(count, max(session.world.size, max_tokens // rows.sequence_length))
    indices = (np.arange(count) * rows.num_rows // count)[session.world.rank :: session.world.size].tolist()
    for first in range(0, len(indices), session.micro_rows):
        yield indices[first : first + session.micro_rows]


def evaluation_sums(
    rows: TextRows,
    session: Session,
    max_tokens: int | None,
    names: Sequence[str],
    measure: Callable[[Units], Mapping[str, Tensor | float]],
) -> tuple[dict[str, float], int]:
    """Return sums over the rows of `rows_of_rank` on all ranks, and the number of their tokens.

    measure: called without gradients with the units of a micro-batch; returns its sum for each of `names`.
    """
    sums = dict.fromkeys(("rows", *names), 0.0)  # a rank may have no rows
    for indices in rows_of_rank(rows, session, max_tokens):
        sums["rows"] += len(indices)
        with torch.no_grad():
            for name, value in measure([rows.rows[i] for i in indices]).items():
                sums[name] += float(value)
    totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=session.world.device)
    sums = dict(zip(sums, session.world.all_reduce_sum(totals).tolist(), strict=True))
    return sums, int(sums.pop("rows")) * rows.sequence_length


class StepBuilder(Protocol):
    """An objective on `TextRows`."""

    def step_batches(
        self, rows: TextRows, mine: Units, step: Units, micro_rows: int, device: torch.device
    ) -> list[Batch]:
        """Return the micro-batches of the units `mine` of this rank, of a step with the units `step` on all ranks."""


class StepLoader:
    """Iterator over optimizer steps. The rows of a step are a function of seed and position, as in pretraining."""

    def __init__(self, objective: StepBuilder, rows: TextRows, options: LoaderOptions):
        self.objective, self.rows, self.options, self.position = objective, rows, options, options.start_row

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        options = self.options
        step = self.rows.rows_at(options.seed, self.position + np.arange(options.rows_per_step))
        self.position += options.rows_per_step
        rank_rows = options.rows_per_step // options.world_size
        mine = step[options.rank * rank_rows : (options.rank + 1) * rank_rows]
        return self.objective.step_batches(self.rows, mine, step, options.micro_batch_rows, options.device)

    def close(self) -> None:
        pass
