"""Loader of optimizer steps as lists of micro-batches, prefetched by a thread.

Step s of a run has the rows start + s * rows_per_step onwards of the global order (see `rows`). Rank r of W takes
the r-th of W equal slices of each step, and micro-batches are slices of that; neither changes the content of a
step.

On a CUDA device the thread fills a ring of page-locked buffers, and the copies run on a side stream, overlapped
with computation. The thread itself never calls CUDA, so it cannot disturb a graph capture on the main thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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

    tokens_BT, targets_BT and positions_BT are int64 [B, T], targets -100 where there is nothing to predict.
    cu_seqlens is int32 of a fixed length: where each document's piece begins in the flattened B * T tokens, then B * T
    repeated to the end. It and positions_BT are None when documents are not masked from each other.
    num_valid counts this micro-batch's targets, num_valid_step those of the whole optimizer step on all ranks.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    cu_seqlens: torch.Tensor | None
    positions_BT: torch.Tensor | None
    num_valid: int
    num_valid_step: int


@dataclass
class _Buffers:
    """Host memory for one step of one rank: tokens, targets, positions [3, rows, T]; cu_seqlens [micro-batches, N]."""

    rows_3RT: torch.Tensor
    cu_MN: torch.Tensor
    copied: torch.cuda.Event | None = None


@dataclass
class _Filled:
    buffers: _Buffers
    valid: list[int]
    valid_step: int


@dataclass(frozen=True)
class LoaderOptions:
    """The rows of a loader, and where they go.

    seed: of the order. start_row: position in the global order of the first step's first row (0 for a new run).
    rows_per_step: rows of one optimizer step over all ranks. document_mask: give cu_seqlens and positions, so that
    documents in a row do not see each other. prefetch: steps that are filled ahead.
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


class Loader:
    """Iterates optimizer steps without end, each a list of micro-batches (`Batch`).

    Raises UsageError if the rows of a step do not divide into ranks and micro-batches.
    """

    def __init__(self, dataset: PackedDataset, options: LoaderOptions) -> None:
        rows_per_step, micro_batch_rows, world_size = (
            options.rows_per_step,
            options.micro_batch_rows,
            options.world_size,
        )
        if rows_per_step < 1 or micro_batch_rows < 1 or rows_per_step % (world_size * micro_batch_rows):
            raise UsageError(
                f"{rows_per_step} rows per step do not divide into {world_size} process(es) x micro-batches of "
                f"{micro_batch_rows} rows. Choose a step of a multiple of {world_size * micro_batch_rows} rows."
            )
        if not 0 <= options.rank < world_size:
            raise ValueError(f"rank {options.rank} of {world_size}")
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
        self._ahead: deque[Future[_Filled]] = deque()
        self._closed = False
        for step in range(max(1, options.prefetch)):
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
        """Queue a step with a buffer: a new one on a CPU, where the consumer keeps it, and one of the ring on CUDA."""
        if self._stream is None:
            buffers = self._allocate()
        elif self._free:
            buffers = self._free.pop()
        else:
            buffers = self._copying.popleft()
            assert buffers.copied is not None
            buffers.copied.synchronize()  # the copy was issued a step ago on its own stream, so it has usually finished
        self._ahead.append(self._pool.submit(self._fill, row, buffers))

    def _fill(self, row: int, buffers: _Buffers) -> _Filled:
        """Fill a buffer, in the thread. row: position of the step in the global order."""
        mine = row + self.options.rank * self._rank_rows
        positions = np.arange(mine, mine + self._rank_rows)
        rows = self.dataset.rows(self.options.seed, positions, buffers.rows_3RT.numpy())
        cu = buffers.cu_MN.numpy()
        for m in range(len(cu)):
            cu_seqlens(rows, m * self.micro_rows, (m + 1) * self.micro_rows, cu[m])
        everyone = self.dataset.num_valid_at(
            self.options.seed, np.arange(row, row + self.options.rows_per_step)
        )
        valid = rows.num_valid.reshape(-1, self.micro_rows).sum(axis=1)
        return _Filled(buffers, valid.tolist(), int(everyone.sum()))

    def _to_device(self, filled: _Filled) -> list[Batch]:
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
        batches = []
        for m, valid in enumerate(filled.valid):
            tokens_BT, targets_BT, positions_BT = rows_3RT[:, m * self.micro_rows : (m + 1) * self.micro_rows]
            batches.append(
                Batch(
                    tokens_BT,
                    targets_BT,
                    cu_MN[m] if self.options.document_mask else None,
                    positions_BT if self.options.document_mask else None,
                    valid,
                    filled.valid_step,
                )
            )
        return batches


def cu_seqlens(rows: RowBatch, first: int, last: int, out: NDArray[np.int32]) -> None:
    """Write the boundaries of rows first:last, relative to the first, to `out`, padded with their total length."""
    width = rows.inputs.shape[1]
    found = rows.boundaries[rows.row_boundaries[first] : rows.row_boundaries[last]]
    out[: len(found)] = found - first * width
    out[len(found) :] = (last - first) * width


def evaluated_rows(dataset: PackedDataset, max_rows: int | None) -> NDArray[np.int64]:
    """Return the numbers of the evaluated rows: all, or `max_rows` evenly spaced ones."""
    total = dataset.num_rows
    wanted = total if max_rows is None else min(total, max_rows)
    return np.arange(wanted) * total // max(1, wanted)


def validation_batches(
    dataset: PackedDataset,
    micro_rows: int,
    device: torch.device | str = "cpu",
    max_rows: int | None = None,
    document_mask: bool = True,
) -> Iterator[Batch]:
    """Yield every row once, unshuffled; with `max_rows`, that many evenly spaced rows.

    All batches have micro_rows rows; the last is padded with rows without targets. num_valid_step is the number of
    targets in all batches together. The bytes of a target are dataset.token_bytes[target].
    """
    width, numbers = dataset.sequence_length, evaluated_rows(dataset, max_rows)
    wanted = len(numbers)
    cu_length = dataset.max_boundaries(micro_rows) + 1
    valid_total = int(dataset.num_valid_per_row[numbers].sum())
    for first in range(0, wanted, micro_rows):
        rows = dataset.rows_by_number(numbers[first : first + micro_rows])
        n = len(rows.inputs)
        stacked = np.empty((3, micro_rows, width), dtype=np.int64)
        stacked[0, n:], stacked[1, n:], stacked[2, n:] = (
            dataset.index.tokenizer.eos_id,
            IGNORE,
            np.arange(width),
        )
        for part, array in zip(stacked, (rows.inputs, rows.targets, rows.positions), strict=True):
            part[:n] = array
        cu = np.empty(cu_length, dtype=np.int32)
        cu_seqlens(rows, 0, n, cu)
        used = int(rows.row_boundaries[n])
        cu[used : used + micro_rows - n] = np.arange(n, micro_rows) * width
        cu[used + micro_rows - n :] = micro_rows * width
        tokens_BT, targets_BT, positions_BT = torch.from_numpy(stacked).to(device)
        yield Batch(
            tokens_BT,
            targets_BT,
            torch.from_numpy(cu).to(device) if document_mask else None,
            positions_BT if document_mask else None,
            int(rows.num_valid.sum()),
            valid_total,
        )
