"""Data loader: yields optimizer steps as lists of micro-batches, which a thread prefetches.

Step s of a run has rows_per_step rows of the global order (see `rows`), starting at position
start_row + s * rows_per_step. Rank r of W takes the r-th of W equal slices of each step, and micro-batches are slices
of this slice. So the content of a step depends neither on the number of ranks nor on the micro-batch size.

On a CUDA device, the thread fills a ring of page-locked buffers, and the main thread copies them to the device on a
side stream, overlapped with computation. The prefetching thread never calls CUDA, so it cannot disturb a graph capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from deskside.data.reading.rows import IGNORE, PackedDataset, RowBatch
from deskside.utils.errors import UsageError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its device.

    tokens_BT, targets_BT and positions_BT are int64 of shape (B, T). A target is -100 where nothing is predicted.
    cu_seqlens is int32 with a fixed length: where each document's piece begins in the flattened B * T tokens, and then
    the value B * T up to the end. cu_seqlens and positions_BT are None if documents in a row may attend to each other.
    num_valid is the number of targets in this micro-batch, num_valid_step in the whole optimizer step on all ranks.
    languages_BT, on the CPU, is the index of each token's language in `PackedDataset.languages`, -1 for padding; it is
    None except in validation batches of data in more than one language. future_targets_BTK: see `future_targets`; None
    unless the loader was asked for them.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    cu_seqlens: torch.Tensor | None
    positions_BT: torch.Tensor | None
    num_valid: int
    num_valid_step: int
    languages_BT: torch.Tensor | None = field(default=None, kw_only=True)
    future_targets_BTK: torch.Tensor | None = field(default=None, kw_only=True)


@dataclass
class _Buffers:
    """Host memory for one step of one rank.

    rows_3RT: tokens, targets and positions, shape (3, rows, T). cu_MN: cu_seqlens of the micro-batches, shape
    (micro-batches, N). copied: the event after the last copy to the device.
    """

    rows_3RT: torch.Tensor
    cu_MN: torch.Tensor
    copied: torch.cuda.Event | None = None


@dataclass
class _FilledStep:
    buffers: _Buffers
    num_valid: list[int]  # of each micro-batch
    num_valid_step: int


@dataclass(frozen=True)
class LoaderOptions:
    """Options of a loader.

    seed: of the order of rows. start_row: position of the first step in the global order (0 for a new run).
    rows_per_step: rows of one optimizer step over all ranks. document_mask: yield cu_seqlens and positions, so that
    documents in a row do not attend to each other. prefetch: number of steps that are filled in advance, at least 1.
    future_targets: number of tokens after the next one that are targets too.
    """

    seed: int
    start_row: int
    rows_per_step: int
    micro_batch_rows: int
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    document_mask: bool = True
    prefetch: int = 2
    future_targets: int = 0


class Loader:
    """Endless iterator over optimizer steps, each a list of micro-batches (`Batch`). Also a context manager.

    Raises UsageError if the rows of a step cannot be divided evenly among ranks and micro-batches.
    """

    def __init__(self, dataset: PackedDataset, options: LoaderOptions) -> None:
        rows_per_step, micro_batch_rows = options.rows_per_step, options.micro_batch_rows
        world_size = options.world_size
        if rows_per_step < 1 or micro_batch_rows < 1 or rows_per_step % (world_size * micro_batch_rows):
            raise UsageError(
                f"{rows_per_step} rows per step cannot be divided into micro-batches of {micro_batch_rows} rows on "
                f"{world_size} process(es). Choose a step of a multiple of {world_size * micro_batch_rows} rows."
            )
        if not 0 <= options.rank < world_size:
            raise ValueError(f"rank {options.rank} is not below the world size {world_size}")
        self.dataset, self.options, self.device = dataset, options, options.device
        self.micro_rows = micro_batch_rows
        self._rank_rows = rows_per_step // world_size
        self._next_row = options.start_row
        self._cu_length = dataset.max_boundaries(micro_batch_rows) + 1
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if cuda else None
        self._free = [self._allocate() for _ in range(options.prefetch + 1)] if cuda else []
        self._copying: deque[_Buffers] = deque()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deskside-loader")
        self._ahead: deque[Future[_FilledStep]] = deque()
        self._closed = False
        for step in range(options.prefetch):
            self._fill_later(options.start_row + step * rows_per_step)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._closed:
            raise StopIteration
        filled = self._ahead[0].result()  # re-raises an exception of the thread
        self._ahead.popleft()
        self._fill_later(self._next_row + (len(self._ahead) + 1) * self.options.rows_per_step)
        self._next_row += self.options.rows_per_step
        return self._to_device(filled)

    def close(self) -> None:
        """Stop the thread and wait for it. Further steps raise StopIteration."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _allocate(self) -> _Buffers:
        shape = (3, self._rank_rows, self.dataset.sequence_length)
        cu_shape = (self._rank_rows // self.micro_rows, self._cu_length)
        pinned = self._stream is not None
        return _Buffers(
            torch.empty(shape, dtype=torch.int64, pin_memory=pinned),
            torch.empty(cu_shape, dtype=torch.int32, pin_memory=pinned),
        )

    def _fill_later(self, row: int) -> None:
        """Queue the filling of a step. row: position of the step in the global order.

        On a CPU each step has new buffers, because the yielded batches use their memory; on CUDA, buffers of the ring.
        """
        if self._stream is None:
            buffers = self._allocate()
        elif self._free:
            buffers = self._free.pop()
        else:
            buffers = self._copying.popleft()
            assert buffers.copied is not None
            buffers.copied.synchronize()  # rarely waits: the copy was issued at least a step ago
        self._ahead.append(self._pool.submit(self._fill, row, buffers))

    def _fill(self, row: int, buffers: _Buffers) -> _FilledStep:
        """Fill the buffers of a step. Runs in the thread. row: position of the step in the global order."""
        first = row + self.options.rank * self._rank_rows
        positions = np.arange(first, first + self._rank_rows)
        rows = self.dataset.rows(self.options.seed, positions, buffers.rows_3RT.numpy())
        cu = buffers.cu_MN.numpy()
        for m in range(len(cu)):
            cu_seqlens(rows, m * self.micro_rows, (m + 1) * self.micro_rows, cu[m])
        step_positions = np.arange(row, row + self.options.rows_per_step)
        num_valid_step = int(self.dataset.num_valid_at(self.options.seed, step_positions).sum())
        num_valid = rows.num_valid.reshape(-1, self.micro_rows).sum(axis=1)
        return _FilledStep(buffers, num_valid.tolist(), num_valid_step)

    def _to_device(self, filled: _FilledStep) -> list[Batch]:
        rows_3RT, cu_MN = filled.buffers.rows_3RT, filled.buffers.cu_MN
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            with torch.cuda.stream(self._stream):
                rows_3RT = rows_3RT.to(self.device, non_blocking=True)
                cu_MN = cu_MN.to(self.device, non_blocking=True)
                filled.buffers.copied = torch.cuda.Event()
                filled.buffers.copied.record()
            current.wait_stream(self._stream)
            rows_3RT.record_stream(current)
            cu_MN.record_stream(current)
            self._copying.append(filled.buffers)
        elif self.device.type != "cpu":
            rows_3RT, cu_MN = rows_3RT.to(self.device), cu_MN.to(self.device)
        batches, count = [], self.options.future_targets
        for m, num_valid in enumerate(filled.num_valid):
            tokens_BT, targets_BT, positions_BT = rows_3RT[:, m * self.micro_rows : (m + 1) * self.micro_rows]
            batches.append(
                Batch(
                    tokens_BT,
                    targets_BT,
                    cu_MN[m] if self.options.document_mask else None,
                    positions_BT if self.options.document_mask else None,
                    num_valid,
                    filled.num_valid_step,
                    future_targets_BTK=future_targets(targets_BT, positions_BT, count) if count else None,
                )
            )
        return batches


def future_targets(targets_BT: torch.Tensor, positions_BT: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` tokens after each token's target, (B, T, count); -100 beyond its document's piece in the row.

    positions_BT: positions within pieces, from 0. A token is in the same piece as the token k places before it if its
    position is at least k.
    """
    found_BTK = targets_BT.new_full((*targets_BT.shape, count), IGNORE)
    for k in range(1, min(count, targets_BT.shape[1] - 1) + 1):
        same_piece = positions_BT[:, k:] >= k
        found_BTK[:, :-k, k - 1] = torch.where(same_piece, targets_BT[:, k:], IGNORE)
    return found_BTK


def cu_seqlens(rows: RowBatch, first: int, last: int, out: NDArray[np.int32]) -> None:
    """Write the cu_seqlens of rows first:last to `out`. The end is filled with the total length of these rows."""
    width = rows.inputs.shape[1]
    boundaries = rows.boundaries[rows.row_boundaries[first] : rows.row_boundaries[last]]
    out[: len(boundaries)] = boundaries - first * width
    out[len(boundaries) :] = (last - first) * width


def evaluated_rows(dataset: PackedDataset, max_rows: int | None) -> NDArray[np.int64]:
    """Return the numbers of the rows to evaluate: all rows, or at most `max_rows` evenly spaced ones."""
    total = dataset.num_rows
    count = total if max_rows is None else min(total, max_rows)
    return np.arange(count) * total // max(1, count)


def validation_batches(
    dataset: PackedDataset,
    micro_rows: int,
    device: torch.device | str = "cpu",
    max_rows: int | None = None,
    document_mask: bool = True,
) -> Iterator[Batch]:
    """Yield batches of all rows in packing order, or of at most `max_rows` evenly spaced rows.

    Every batch has micro_rows rows; the last is padded with rows without targets. num_valid_step is the number of
    targets in all batches together. A target has dataset.token_bytes[target] bytes of text.
    """
    width, numbers = dataset.sequence_length, evaluated_rows(dataset, max_rows)
    cu_length = dataset.max_boundaries(micro_rows) + 1
    num_valid_total = int(dataset.num_valid_per_row[numbers].sum())
    for first in range(0, len(numbers), micro_rows):
        rows = dataset.rows_by_number(numbers[first : first + micro_rows])
        n = len(rows.inputs)
        stacked = np.empty((3, micro_rows, width), dtype=np.int64)
        stacked[0, :n], stacked[1, :n], stacked[2, :n] = rows.inputs, rows.targets, rows.positions
        stacked[0, n:] = dataset.index.tokenizer.eos_id
        stacked[1, n:] = IGNORE
        stacked[2, n:] = np.arange(width)
        cu = np.empty(cu_length, dtype=np.int32)
        cu_seqlens(rows, 0, n, cu)
        used = int(rows.row_boundaries[n])  # then come the boundaries of the padding rows
        cu[used : used + micro_rows - n] = np.arange(n, micro_rows) * width
        cu[used + micro_rows - n :] = micro_rows * width
        tokens_BT, targets_BT, positions_BT = torch.from_numpy(stacked).to(device)
        languages_BT = None
        if len(dataset.languages) > 1:
            languages_BT = torch.full((micro_rows, width), -1, dtype=torch.int64)
            languages_BT[:n] = torch.from_numpy(
                dataset.languages_by_number(numbers[first : first + micro_rows])
            )
        yield Batch(
            tokens_BT,
            targets_BT,
            torch.from_numpy(cu).to(device) if document_mask else None,
            positions_BT if document_mask else None,
            int(rows.num_valid.sum()),
            num_valid_total,
            languages_BT=languages_BT,
        )
