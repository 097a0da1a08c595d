"""Packing of answers into rows: texts that begin with a question, of which only the rest is scored.

Rows have the format of pretraining (`data/reading/rows.py`): several texts in sequence, which cannot attend to each
other. A unit must stay together in a row: the two answers of a pair, or one sampled answer. Units are packed
best-fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deskside.align.logprobs import by_sequence, token_logprobs
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch
from deskside.data.reading.packing import pack
from deskside.data.reading.rows import IGNORE
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.ops.moe import load_balancing_loss
from deskside.train.objective import Session
from deskside.utils.errors import UsageError


@dataclass(frozen=True)
class Text:
    """Tokens of a question with its answer, int64. The answer begins at index `answer` and is not empty."""

    tokens: NDArray[np.int64]
    answer: int

    @property
    def room(self) -> int:
        """Return the tokens that it takes in a row: all but the last, which is only a target."""
        return len(self.tokens) - 1

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.answer


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """A micro-batch of S answers; targets are -100 outside them.

    counted_M: int64, indices of the answers' targets in the flattened rows, answer by answer. mask_SL: bool, the
    number of targets of each answer.
    """

    counted_M: Tensor
    mask_SL: Tensor


@dataclass(frozen=True)
class Scores:
    """logprobs_SL and entropy_SL: of each answer's tokens, float32, zero elsewhere. balance: the load-balancing
    loss of a mixture of experts.
    """

    logprobs_SL: Tensor
    entropy_SL: Tensor
    balance: Tensor | None


def score(
    model: Transformer,
    batch: AnswerBatch,
    context: AttentionContext,
    compute: ComputeConfig,
    temperature: float = 1.0,
) -> Scores:
    """Compute the log-probabilities of a micro-batch's answers. The head is applied to the answers only."""
    hidden_BTD, statistics = model.hidden_and_router(batch.tokens_BT, context, batch.positions_BT)
    logprobs_M, entropy_M = token_logprobs(
        hidden_BTD.flatten(0, 1).index_select(0, batch.counted_M),
        model.head_weight,
        batch.targets_BT.flatten()[batch.counted_M],
        temperature=temperature,
        softcap=model.config.final_logit_softcapping,
        chunk_tokens=compute.loss_chunk_tokens,
    )
    balance = load_balancing_loss(torch.stack(statistics), batch.tokens_BT.numel()) if statistics else None
    return Scores(by_sequence(logprobs_M, batch.mask_SL), by_sequence(entropy_M, batch.mask_SL), balance)


def evaluation_context(session: Session, batch: Batch) -> AttentionContext:
    """Return the attention context of a forward pass outside a training step."""
    tokens = batch.tokens_BT.shape[1]
    full, windowed = session.attention.at(tokens, None)
    return AttentionContext(
        cu_seqlens=batch.cu_seqlens, max_seqlen=tokens, backend=full, window_backend=windowed
    )


def check_compute(config: RunConfig) -> None:
    """Raise UsageError for options of the pretraining loss that have no effect here."""
    if config.compute.z_loss:
        raise UsageError("compute.z_loss: has no effect on this objective; remove it")
    if config.precision.head == "fp8":
        raise UsageError("precision.head: this objective computes the head in BF16; use bf16")
    if config.parallel.mode == "shard":
        raise UsageError("parallel.mode: this objective runs on whole models; use --parallel.mode replicate")
    if len(config.stages()) > 1:
        raise UsageError("schedule.stages: this objective has rows of one length; give none")


def pack_units(rooms: NDArray[np.int64], sequence_length: int) -> list[NDArray[np.int64]]:
    """Return the units of each row. rooms: tokens of each unit, at most sequence_length."""
    numbers = np.arange(len(rooms), dtype=np.int64)
    packing = pack(numbers, rooms, sequence_length)
    return np.split(packing.start, packing.row_start[1:-1]) if packing.num_rows else []


def lay_out(
    rows: Sequence[Sequence[Text]], sequence_length: int, boundaries: int, filler: int
) -> dict[str, Any]:
    """Convert rows of texts to the fields of an `AnswerBatch`, except the two counts, as CPU tensors.

    boundaries: the length of cu_seqlens. filler: the padding token.
    """
    shape = (len(rows), sequence_length)
    tokens, positions = np.full(shape, filler, np.int64), np.zeros(shape, np.int64)
    targets = np.full(shape, IGNORE, np.int64)
    starts: list[int] = []
    counted: list[NDArray[np.int64]] = []
    for number, row in enumerate(rows):
        at = 0
        for text in row:
            end, first = at + text.room, at + text.answer - 1
            tokens[number, at:end] = text.tokens[:-1]
            targets[number, first:end] = text.tokens[text.answer :]
            positions[number, at:end] = np.arange(text.room)
            starts.append(number * sequence_length + at)
            counted.append(np.arange(first, end) + number * sequence_length)
            at = end
        if at < sequence_length:
            positions[number, at:] = np.arange(sequence_length - at)
            starts.append(number * sequence_length + at)
    cu_seqlens = np.full(boundaries, tokens.size, np.int32)
    cu_seqlens[: len(starts)] = starts
    lengths = np.array([len(c) for c in counted], np.int64)
    mask = np.arange(lengths.max(initial=1)) < lengths[:, None]
    return {
        "tokens_BT": torch.from_numpy(tokens),
        "targets_BT": torch.from_numpy(targets),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "positions_BT": torch.from_numpy(positions),
        "counted_M": torch.from_numpy(np.concatenate([*counted, np.empty(0, np.int64)])),
        "mask_SL": torch.from_numpy(mask),
    }


def moved(fields: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy tensors to the device without synchronization."""
    if device.type != "cuda":
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in fields.items()}
    return {
        k: v.pin_memory().to(device, non_blocking=True) if isinstance(v, Tensor) else v
        for k, v in fields.items()
    }


def full_row_texts(sequence_length: int, texts: int, vocabulary: int) -> list[Text]:
    """Return random texts that fill a row and are scored from their second token on: the most expensive row."""
    generator = np.random.default_rng(0)
    cuts = np.linspace(0, sequence_length, texts + 1).astype(int)
    return [Text(generator.integers(vocabulary, size=n + 1), 1) for n in np.diff(cuts).tolist()]
