"""Micro-batch fitting: how many rows fit on this card at once, settled before any data is read.

A dry step is run with the largest candidate: two passes where the step has several, so that gradients stand beside the
activations, optimizer state included, on a batch whose every position counts. Out of memory halves it, or takes the
next smaller divisor; accumulation grows in return, so the effective batch never changes. Candidates modelled to
need far more than there is are not tried. The result is recorded, and a resumed run does not search again.
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

CPU_MICRO_TOKENS = 8192  # no memory to fit on a CPU; larger batches only leave its caches


@dataclass(frozen=True)
class Fit:
    """Rows per forward pass on one process, passes per step, and what was tried."""

    micro_rows: int
    accumulation: int
    attempts: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def candidates(rows: int, largest: int) -> list[int]:
    """Divisors of `rows` up to `largest`, descending, each at most half of the one before it (if there is one)."""
    divisors = [n for n in range(min(rows, max(1, largest)), 0, -1) if rows % n == 0]
    chosen: list[int] = []
    for n in divisors:
        if not chosen or 2 * n <= chosen[-1] or n == 1:
            chosen.append(n)
    return chosen


def rows_per_rank(tokens: int, sequence_length: int, world: World) -> int:
    """Rows of one optimizer step on one process. Raises UsageError when they cannot be shared evenly."""
    rows = tokens // sequence_length
    if rows % world.size:
        raise UsageError(
            f"batch.tokens: {tokens} is {rows} rows, which {world.size} processes cannot share evenly; "
            f"use a multiple of {world.size * sequence_length}"
        )
    return rows // world.size


def fit(
    dry_step: Callable[[int], float],
    rows: int,
    largest: int,
    say: Callable[[str], None],
    forget: Callable[[], None],
) -> Fit:
    """Run `dry_step(micro_rows)` (which returns seconds) with ever fewer rows until it fits.

    `dry_step` raises torch.OutOfMemoryError on every process where one is out of memory; `forget` then frees what the
    attempt left. Raises RunError when one row does not fit.
    """
    attempts: list[dict[str, Any]] = []
    for micro_rows in candidates(rows, largest):
        try:
            seconds = dry_step(micro_rows)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(".")[0]
            error.__traceback__ = None  # it holds the frames, and so the tensors, of the failed step
        else:
            attempts.append({"micro_rows": micro_rows, "fits": True, "seconds": seconds})
            return Fit(micro_rows, rows // micro_rows, tuple(attempts))
        attempts.append({"micro_rows": micro_rows, "fits": False, "seconds": None})
        forget()
        if micro_rows > 1:
            say(
                f"{micro_rows} rows do not fit ({reason}): trying fewer per pass and more passes; "
                f"the batch stays the same"
            )
    raise RunError(
        "out of memory with a single row: use a smaller model, a shorter --batch.sequence_length, "
        "--compute.activation_checkpointing block or a smaller --compute.loss_chunk_tokens"
    )


def forget(device: torch.device) -> None:
    """Free what a failed attempt left, its compiled code for that shape included."""
    gc.collect()
    if "torch._dynamo" in sys.modules:  # it takes seconds to import, and until then nothing is compiled by it
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class RowShape(Protocol):
    """What a dry step must know of the rows that will come; `PackedDataset` is one."""

    @property
    def sequence_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def max_boundaries(self, rows: int) -> int: ...


def worst_case_batch(
    dataset: RowShape, rows: int, passes_everywhere: int, device: torch.device, document_mask: bool
) -> Batch:
    """Random tokens that fill every position, each row one document; the shapes are those of the loader's batches."""
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
