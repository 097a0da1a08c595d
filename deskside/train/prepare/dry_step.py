"""Micro-batch candidates and the batch of a dry step.

A dry step is a whole step, with optimizer state, on a batch in which every position counts. It runs two passes if the
step has several, because the gradients of the first are in memory during the second. If it runs out of memory, the next
smaller divisor of the rows is tried with more gradient accumulation, so the effective batch size never changes.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from deskside.data.reading.loader import Batch
from deskside.train.parallel import World
from deskside.utils.errors import RunError, UsageError

CPU_MICRO_TOKENS = 8192  # a CPU has no memory limit to find, and larger batches only leave its caches


@dataclass(frozen=True)
class MicroBatch:
    """Rows per forward pass on one process, gradient accumulation steps, and the attempts that led to them."""

    micro_rows: int
    accumulation: int
    attempts: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def candidates(rows: int, largest: int) -> list[int]:
    """Return divisors of `rows` up to `largest`, descending, each at most half of the previous one."""
    divisors = [n for n in range(min(rows, max(1, largest)), 0, -1) if rows % n == 0]
    chosen: list[int] = []
    for n in divisors:
        if not chosen or 2 * n <= chosen[-1] or n == 1:
            chosen.append(n)
    return chosen


def rows_per_rank(tokens: int, sequence_length: int, world: World) -> int:
    """Return the rows of one optimizer step on one process. Raises UsageError if they cannot be divided evenly."""
    rows = tokens // sequence_length
    if rows % world.size:
        raise UsageError(
            f"batch.tokens: {tokens} is {rows} rows, which {world.size} processes cannot share evenly; "
            f"use a multiple of {world.size * sequence_length}"
        )
    return rows // world.size


def find_micro_batch(
    dry_step: Callable[[int], float],
    rows: int,
    largest: int,
    log: Callable[[str], None],
    free_memory: Callable[[], None],
) -> MicroBatch:
    """Run `dry_step(micro_rows)`, which returns seconds, with fewer and fewer rows until it fits in memory.

    If one process runs out of memory, `dry_step` raises torch.OutOfMemoryError on all of them; `free_memory` then frees
    what the attempt left. Raises RunError if a single row does not fit.
    """
    attempts: list[dict[str, Any]] = []
    for micro_rows in candidates(rows, largest):
        try:
            seconds = dry_step(micro_rows)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(".")[0]
            error.__traceback__ = None  # it references the frames, and so the tensors, of the failed step
        else:
            attempts.append({"micro_rows": micro_rows, "fits": True, "seconds": seconds})
            return MicroBatch(micro_rows, rows // micro_rows, tuple(attempts))
        attempts.append({"micro_rows": micro_rows, "fits": False, "seconds": None})
        free_memory()
        if micro_rows > 1:
            log(
                f"{micro_rows} rows do not fit ({reason}): trying fewer per pass and more passes; "
                f"the batch stays the same"
            )
    raise RunError(
        "out of memory with a single row: use a smaller model, a shorter --batch.sequence_length, "
        "--compute.activation_checkpointing block or a smaller --compute.loss_chunk_tokens"
    )


def free_failed_attempt(device: torch.device) -> None:
    """Free the memory of a failed attempt, including the code compiled for its shape."""
    gc.collect()
    if (
        "torch._dynamo" in sys.modules
    ):  # importing it takes seconds, and nothing was compiled before it is imported
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class RowShape(Protocol):
    """Shape of a dataset's rows, which is all that a dry step needs. `PackedDataset` is one."""

    @property
    def sequence_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def max_boundaries(self, rows: int) -> int: ...


def worst_case_batch(
    dataset: RowShape, rows: int, passes_everywhere: int, device: torch.device, document_mask: bool
) -> Batch:
    """Return random tokens in every position, one document per row, in the shapes of the loader's batches."""
    length = dataset.sequence_length
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(dataset.vocab_size, (rows, length), generator=generator).to(device)
    cu_seqlens = positions_BT = None
    if document_mask:
        cu_seqlens = torch.full((dataset.max_boundaries(rows) + 1,), rows * length, dtype=torch.int32)
        cu_seqlens[: rows + 1] = torch.arange(rows + 1) * length
        cu_seqlens = cu_seqlens.to(device)
        positions_BT = torch.arange(length).expand(rows, length).contiguous().to(device)
    valid = rows * length
    return Batch(tokens_BT, tokens_BT, cu_seqlens, positions_BT, valid, valid * passes_everywhere)
