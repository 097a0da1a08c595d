"""A prepared data set as training rows of one length, with random access by position in an endless order.

The row at position p is a pure function of (data, sequence length, weights, packing, seed, p). The mixture maps p to a
component and the number of its earlier rows. This number gives the epoch of the component, and each epoch has its own
permutation of the component's rows, and with `shuffled_packing` of its documents too. Ranks and micro-batches take
slices of the order, so the data of a run does not depend on the number of GPUs, and a resumed run continues at its
position without reading earlier rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from deskside.data import tokenizer
from deskside.data.reading import shards
from deskside.data.reading.mixing import PERIOD, Mixture, assign_components, temperature_weights
from deskside.data.reading.packing import Packing, pack
from deskside.data.reading.shuffle import combine_keys, endless_shuffle
from deskside.data.reading.shuffled_packing import ShuffledPacking, max_pieces
from deskside.data.reading.verify import checked_index
from deskside.utils.errors import UsageError

IGNORE = -100  # the target of padding and of tokens not trained on, ignored by the loss


@dataclass(frozen=True)
class RowBatch:
    """n rows of T tokens. inputs, targets and positions are int64 of shape [n, T].

    A target is the document's next token, even if this token is the first of a piece in another row. In a conversation,
    the target is -100 unless the model is trained on the token. Positions count from 0 in every piece. The padding
    of a row is a piece of its own: end-of-text tokens with target -100. `boundaries` lists where each piece begins in
    the flattened n * T tokens; those of row r are boundaries[row_boundaries[r] : row_boundaries[r + 1]]. `num_valid` is
    the number of targets other than -100 in each row, shape [n].
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    row_boundaries: NDArray[np.int64]
    num_valid: NDArray[np.int64]


@dataclass(frozen=True)
class Truncation:
    """The numbers of conversations cut to the length of a row, and left out for having nothing to train on in it."""

    shortened: int = 0
    left_out: int = 0


class PackedDataset:
    """One split of a prepared data set, checked (see `checked_index`) and packed for one sequence length.

    weights: of sources and languages, to mix them. language_temperature, source_temperature: mix the languages or the
    sources by their size. Give at most one of the three; see `mixing`. languages: those of its documents, sorted.
    packing: "best-fit" (`packing`), or "shuffled" (`shuffled_packing`), which is for text only. Rows by number are then
    those of one fixed epoch. Conversations are not cut into several pieces: a conversation longer than a row is
    truncated or left out, and counted in `truncation`.

    Raises UsageError if there is no such data set or split, or for an invalid length or weights; RunError if the data
    is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        split: str,
        sequence_length: int,
        weights: dict[str, float] | None = None,
        language_temperature: float | None = None,
        packing: Literal["best-fit", "shuffled"] = "best-fit",
        source_temperature: float | None = None,
    ) -> None:
        directory = Path(os.path.expanduser(path))
        index = checked_index(directory)
        if split not in index.splits:
            raise UsageError(
                f"{directory}: has no split {split!r}. It has: {', '.join(sorted(index.splits))}."
            )
        if sequence_length < 2:
            raise UsageError(f"sequence length {sequence_length}: give at least 2 tokens.")
        self.directory, self.split, self.index = directory, split, index
        self.sequence_length = sequence_length
        tables = []
        self._tokens: list[NDArray[Any]] = []
        masks: list[NDArray[np.uint8]] = []
        shard_starts = [0]  # of each shard in the token stream, the concatenation of the shards
        for shard in index.splits[split].shards:
            self._tokens.append(shards.open_tokens(directory, shard, index.dtype))
            table = shards.open_table(directory, shard)
            length = np.diff(table["start"], append=shard.tokens - 1)
            tables.append((table["start"] + shard_starts[-1], length, table["tag"]))
            shard_starts.append(shard_starts[-1] + shard.tokens)
            if (mask := shards.open_mask(directory, shard)) is not None:
                masks.append(mask)
        start, length, tag = (np.concatenate(column) for column in zip(*tables, strict=True))
        self._shard_starts = np.array(shard_starts[:-1])
        self.languages = sorted({index.tags[t].language for t in np.unique(tag).tolist()})
        number_of = {language: number for number, language in enumerate(self.languages)}
        self._document_starts = start
        language_of_tag = np.array([number_of.get(t.language, -1) for t in index.tags], np.int16)
        self._document_languages = language_of_tag[tag]
        self._masks = masks if len(masks) == len(self._tokens) else None
        self.truncation = Truncation()
        trained_before = np.zeros(1, np.int64)
        if self._masks is not None:
            if packing == "shuffled":
                raise UsageError(
                    f"data.packing: shuffled cuts documents at the ends of rows, and {directory} holds conversations, "
                    "which are not cut; use best-fit"
                )
            # the number of tokens trained on before each position of the stream, shape [tokens + 1]
            trained_before = np.concatenate(([0], np.cumsum(np.concatenate(masks), dtype=np.int64)))
            start, length, keep, self.truncation = _truncate(start, length, sequence_length, trained_before)
            tag = tag[keep]
            if not len(start):
                raise UsageError(
                    f"{directory}: no conversation of the {split} split has anything to train on in its first "
                    f"{sequence_length} tokens. Use longer rows (--batch.sequence_length)."
                )
        names, component_weights, component = ["all"], [1.0], np.zeros(len(tag), dtype=np.int64)
        if weights:
            names, component_weights, component_of_tag = assign_components(
                index.tags, np.unique(tag).tolist(), weights
            )
            component = component_of_tag[tag]
        elif language_temperature is not None:
            names, component = self.languages, language_of_tag[tag].astype(np.int64)
            if len(names) < 2:
                raise UsageError(
                    f"data.language_temperature: all documents of {directory} have the language {names[0]}; remove it, "
                    "or prepare the data with a language for each document (--lang-field, --lang)"
                )
        elif source_temperature is not None:
            names = sorted({index.tags[t].source_name for t in np.unique(tag).tolist()})
            if len(names) < 2:
                raise UsageError(
                    f"data.source_temperature: all documents of {directory} have the source {names[0]}; remove it, or "
                    "prepare the data with a source for each document"
                )
            if len(names) > PERIOD:
                raise UsageError(
                    f"data.source_temperature: {directory} has {len(names):,} sources, and at most {PERIOD:,} can be "
                    "mixed; remove it, or prepare the data with fewer sources"
                )
            of_tag = [names.index(t.source_name) if t.source_name in names else -1 for t in index.tags]
            component = np.array(of_tag, np.int64)[tag]
        temperature = language_temperature if language_temperature is not None else source_temperature
        if temperature is not None and not weights:
            sizes = np.bincount(component, weights=length, minlength=len(names)).astype(np.int64)
            component_weights = temperature_weights(sizes, temperature)
        self.component_names, self.mixture = names, Mixture.of(component_weights)
        self.packings: list[Packing | ShuffledPacking] = []
        self._shuffles_documents = packing == "shuffled"
        make: Any = pack if packing == "best-fit" else ShuffledPacking
        for number, name in enumerate(names):
            selected = component == number
            if not selected.any():
                raise UsageError(
                    f"weight {name}: the {split} split has no such document. Give {name} the weight 0."
                )
            self.packings.append(make(start[selected], length[selected], sequence_length))
        self._arange = np.arange(sequence_length, dtype=np.int64)
        self._row_tokens = [p.row_tokens() for p in self.packings]
        self._num_valid_by_component = self._row_tokens
        if self._masks is not None:
            self._num_valid_by_component = []
            for best_fit in self.packings:
                assert isinstance(best_fit, Packing)
                first = best_fit.start + 1
                trained = trained_before[first + best_fit.length] - trained_before[first]
                self._num_valid_by_component.append(np.add.reduceat(trained, best_fit.row_start[:-1]))

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self.index.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Checksum of the tokens, the masks and the tokenizer, independent of the data set's location."""
        all_shards = [shard for split in self.index.splits.values() for shard in split.shards]
        checksums = [shard.checksum for shard in all_shards]
        checksums += [shard.mask_checksum for shard in all_shards if shard.mask_checksum is not None]
        return xxhash.xxh3_128_hexdigest("\n".join([self.index.tokenizer.checksum, *checksums]).encode())

    def epochs(self, rows: int) -> dict[str, float]:
        """Return the epochs of each component in the first `rows` rows of the order; "all" is one without a mixture."""
        counts = zip(self.component_names, self.mixture.counts(rows), self.packings, strict=True)
        return {name: float(count) / packing.num_rows for name, count, packing in counts}

    @property
    def component_tokens(self) -> dict[str, int]:
        """Tokens of each component in one epoch; "all" is one without a mixture."""
        return {name: p.num_tokens for name, p in zip(self.component_names, self.packings, strict=True)}

    @property
    def component_rows(self) -> dict[str, int]:
        """Rows of each component in one epoch."""
        return {name: p.num_rows for name, p in zip(self.component_names, self.packings, strict=True)}

    @property
    def num_rows(self) -> int:
        """Number of rows of one epoch."""
        return sum(p.num_rows for p in self.packings)

    @property
    def num_tokens(self) -> int:
        """Number of targets of one epoch that are not -100."""
        return int(self.num_valid_per_row.sum())

    @property
    def utilisation(self) -> float:
        """Share of all rows that is filled with tokens, 0 to 1."""
        return sum(p.num_tokens for p in self.packings) / (self.num_rows * self.sequence_length)

    @property
    def num_valid_per_row(self) -> NDArray[np.int64]:
        """Number of targets of each row that are not -100, in packing order, shape [num_rows]."""
        return np.concatenate(self._num_valid_by_component)

    @cached_property
    def token_bytes(self) -> NDArray[np.uint32]:
        """Bytes of text of each token id, shape [vocab], 0 for special tokens. Needed for bits per byte."""
        return tokenizer.token_bytes(tokenizer.load(self.directory))

    def max_boundaries(self, rows: int) -> int:
        """Return an upper bound on the number of pieces, padding included, in `rows` consecutive rows of the order."""
        shuffled = [packing for packing in self.packings if isinstance(packing, ShuffledPacking)]
        if shuffled:
            return max_pieces(shuffled, rows)
        counts = []
        for packing, filled in zip(self.packings, self._row_tokens, strict=True):
            assert isinstance(packing, Packing)
            pieces = np.diff(packing.row_start) + (filled < self.sequence_length)
            most = np.sort(pieces)[::-1][:rows]
            # Consecutive positions can be in different epochs of a component, so a row may occur more than once.
            counts.append(np.repeat(most, rows // packing.num_rows + 2))
        return int(np.sort(np.concatenate(counts))[::-1][:rows].sum())

    def locate(self, seed: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (component, row in the component's packing) at each position of the order, both of shape [n]."""
        component, count = self.mixture.locate(np.asarray(positions, dtype=np.int64))
        row = np.empty_like(count)
        for number in np.unique(component).tolist():
            selected = component == number
            rows = self.packings[number].num_rows
            row[selected] = endless_shuffle(count[selected], rows, seed, self.sequence_length, number)
        return component, row

    def _document_orders(self, seed: int, positions: NDArray[np.int64]) -> list[int]:
        """Return the key of the order of the documents at each position: one for every epoch of every component."""
        component, count = self.mixture.locate(np.asarray(positions, dtype=np.int64))
        return [
            combine_keys(seed, rows // self.packings[number].num_rows, self.sequence_length, number, 1)
            for number, rows in zip(component.tolist(), count.tolist(), strict=True)
        ]

    def num_valid_at(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of targets other than -100 in the row at each position, shape [n]. Reads no tokens."""
        return self._num_valid(*self.locate(seed, positions))

    def _num_valid(self, component: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        num_valid = np.empty_like(row)
        for number in np.unique(component).tolist():
            selected = component == number
            num_valid[selected] = self._num_valid_by_component[number][row[selected]]
        return num_valid

    def rows(self, seed: int, positions: NDArray[np.int64], out: NDArray[np.int64] | None = None) -> RowBatch:
        """Return the rows at these positions of the shuffled, endless order.

        out: an array of shape [3, n, T] to use for inputs, targets and positions.
        """
        orders = self._document_orders(seed, positions) if self._shuffles_documents else None
        return self._gather(*self.locate(seed, positions), out, orders)

    def rows_by_number(self, numbers: NDArray[np.int64]) -> RowBatch:
        """Return rows by number, 0 to num_rows - 1, in packing order."""
        ends = np.cumsum([p.num_rows for p in self.packings])
        component = np.searchsorted(ends, numbers, side="right")
        return self._gather(component, numbers - np.concatenate(([0], ends))[component])

    def languages_by_number(self, numbers: NDArray[np.int64]) -> NDArray[np.int16]:
        """Return the language of each token in rows by number, shape [n, T]: its index in `languages`, -1 for padding.

        A token and its target belong to the same document, so this is the language of the targets too.
        """
        languages = np.full((len(numbers), self.sequence_length), -1, dtype=np.int16)
        ends = np.cumsum([p.num_rows for p in self.packings])
        for i, number in enumerate(numbers.tolist()):
            c = int(np.searchsorted(ends, number, side="right"))
            starts, lengths = self.packings[c].pieces(number - (int(ends[c - 1]) if c else 0), 0)
            document = np.searchsorted(self._document_starts, starts, side="right") - 1
            filled = np.repeat(self._document_languages[document], lengths)
            languages[i, : len(filled)] = filled
        return languages

    def beginnings(self, count: int) -> dict[str, list[int]]:
        """Return the first `count` tokens of a document in each language: the first one that is long enough.

        A language without such a document is left out.
        """
        found: dict[str, list[int]] = {}
        ends = np.append(self._document_starts[1:], sum(len(tokens) for tokens in self._tokens))
        long_enough = ends - self._document_starts >= count
        for number, language in enumerate(self.languages):
            chosen = np.flatnonzero(long_enough & (self._document_languages == number))
            if len(chosen):
                start = int(self._document_starts[chosen[0]])
                shard = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
                in_shard = start - int(self._shard_starts[shard])
                found[language] = self._tokens[shard][in_shard : in_shard + count].tolist()
        return found

    def _gather(
        self,
        component: NDArray[np.int64],
        row: NDArray[np.int64],
        out: NDArray[np.int64] | None = None,
        orders: list[int] | None = None,
    ) -> RowBatch:
        n, width = len(row), self.sequence_length
        inputs, targets, positions = np.empty((3, n, width), np.int64) if out is None else out
        eos = self.index.tokenizer.eos_id
        boundaries: list[int] = []
        row_boundaries = np.zeros(n + 1, dtype=np.int64)
        for i, (c, r) in enumerate(zip(component.tolist(), row.tolist(), strict=True)):
            starts, lengths = self.packings[c].pieces(r, orders[i] if orders else 0)
            piece_shards = np.searchsorted(self._shard_starts, starts, side="right") - 1
            in_shard = starts - self._shard_starts[piece_shards]
            at = 0
            for shard, a, size in zip(
                piece_shards.tolist(), in_shard.tolist(), lengths.tolist(), strict=True
            ):
                tokens = self._tokens[shard][a : a + size + 1]
                end = at + size
                inputs[i, at:end] = tokens[:-1]
                targets[i, at:end] = tokens[1:]
                if self._masks is not None:
                    targets[i, at:end][self._masks[shard][a + 1 : a + size + 1] == 0] = IGNORE
                positions[i, at:end] = self._arange[:size]
                boundaries.append(i * width + at)
                at = end
            if at < width:
                inputs[i, at:] = eos
                targets[i, at:] = IGNORE
                positions[i, at:] = self._arange[: width - at]
                boundaries.append(i * width + at)
            row_boundaries[i + 1] = len(boundaries)
        return RowBatch(
            inputs,
            targets,
            positions,
            np.array(boundaries, np.int64),
            row_boundaries,
            self._num_valid(component, row),
        )


def _truncate(
    start: NDArray[np.int64], length: NDArray[np.int64], width: int, trained_before: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], Truncation]:
    """Truncate conversations to one piece of at most `width` tokens. Leave out those with nothing to train on in it.

    The last token of a conversation is only a target, so a conversation of n tokens is a piece of n - 1 tokens.
    trained_before: number of tokens trained on before each position. Returns (start, length) of the pieces, a mask of
    the conversations that are kept, and the counts.
    """
    length = length - 1
    truncated = np.minimum(length, width)
    trained = trained_before[start + 1 + truncated] > trained_before[start + 1]
    keep = (truncated > 0) & trained
    truncation = Truncation(shortened=int((keep & (length > width)).sum()), left_out=int((~keep).sum()))
    return start[keep], truncated[keep], keep, truncation
