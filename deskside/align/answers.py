"""Pack answers into rows and score them. A text is a question with its answer, of which usually the answer is scored.

Rows have the format of pretraining (`data/reading/rows.py`): several texts in sequence, which cannot attend to each
other. A packing unit stays in one row: the two texts of a preference pair, or the text of one sampled answer. Units
are packed best-fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deskside.align.logprobs import pad_sequences, token_logprobs
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch
from deskside.data.reading.packing import pack
from deskside.data.reading.rows import IGNORE
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.ops.moe import RouterStatistics
from deskside.train.objective import Session
from deskside.utils.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class TokenizedText:
    """Tokens of a question with its answer, int64. The answer begins at index `answer_start` and is not empty.

    scored: indices of the tokens that are scored, rising and at least 1; None for the whole answer.
    """

    tokens: NDArray[np.int64]
    answer_start: int
    scored: NDArray[np.int64] | None = None

    @property
    def num_inputs(self) -> int:
        """Return the number of input tokens, which is the space in a row: the last token is only a target."""
        return len(self.tokens) - 1

    @property
    def targets(self) -> NDArray[np.int64]:
        """Return the indices of the scored tokens."""
        return np.arange(self.answer_start, len(self.tokens)) if self.scored is None else self.scored

    @property
    def num_targets(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """A micro-batch of S answers of up to L scored tokens. Targets that are not scored are -100.

    num_valid and num_valid_step count the units that the loss is averaged over: pairs, answers or tokens.
    target_index_M: int64, positions of the answers' targets in the flattened rows, answer by answer; M in all.
    mask_SL: bool, True for the first n entries of the row of an answer with n targets.
    """

    target_index_M: Tensor
    mask_SL: Tensor


@dataclass(frozen=True)
class Scores:
    """Log-probability and entropy of every scored token, float32 (S, L), zero beyond the end of an answer.

    router: the statistics of the routers of a mixture of experts, None for other models.
    """

    logprobs_SL: Tensor
    entropy_SL: Tensor
    router: RouterStatistics | None


def score(
    model: Transformer,
    batch: AnswerBatch,
    context: AttentionContext,
    compute: ComputeConfig,
    temperature: float = 1.0,
) -> Scores:
    """Compute the log-probabilities of a micro-batch's answers. The head runs on the answers' positions only."""
    hidden_BTD, statistics = model.hidden_and_router(batch.tokens_BT, context, batch.positions_BT)
    logprobs_M, entropy_M = token_logprobs(
        hidden_BTD.flatten(0, 1).index_select(0, batch.target_index_M),
        model.head_weight,
        batch.targets_BT.flatten()[batch.target_index_M],
        temperature=temperature,
        softcap=model.config.final_logit_softcapping,
        chunk_tokens=compute.loss_chunk_tokens,
    )
    router = RouterStatistics(torch.stack(statistics), batch.tokens_BT.numel()) if statistics else None
    return Scores(pad_sequences(logprobs_M, batch.mask_SL), pad_sequences(entropy_M, batch.mask_SL), router)


def evaluation_context(session: Session, batch: Batch) -> AttentionContext:
    """Return the attention context of a forward pass outside a training step.

    It has the attention window of the model, not of a stage of the schedule.
    """
    tokens = batch.tokens_BT.shape[1]
    full, windowed = session.attention.at(tokens, None)
    return AttentionContext(
        cu_seqlens=batch.cu_seqlens, max_seqlen=tokens, backend=full, window_backend=windowed
    )


def check_supported(config: RunConfig) -> None:
    """Raise UsageError for options that DPO, KTO and GRPO do not support."""
    if config.compute.z_loss:
        raise UsageError("compute.z_loss: this objective does not use it; remove it")
    if config.precision.head == "fp8":
        raise UsageError("precision.head: this objective computes the head in BF16; use bf16")
    if config.parallel.mode == "shard":
        raise UsageError("parallel.mode: this objective runs on whole models; use --parallel.mode replicate")
    if len(config.stages()) > 1:
        raise UsageError(
            "schedule.stages: this objective supports one sequence length and batch size only; remove the stages and "
            "schedule.batch_growth"
        )


def pack_units(lengths: NDArray[np.int64], sequence_length: int) -> list[NDArray[np.int64]]:
    """Return the indices of the units in each row. lengths: input tokens of each unit, at most sequence_length."""
    packing = pack(np.arange(len(lengths), dtype=np.int64), lengths, sequence_length)
    return np.split(packing.start, packing.row_start[1:-1]) if packing.num_rows else []


def pass_sizes(rows: int, max_rows: int) -> list[int]:
    """Return the number of rows of each forward pass: `max_rows`, or possibly less in the last pass.

    The last pass has the smallest sufficient size among `max_rows` and a half, a quarter and an eighth of it,
    rounded up. So a compiled step sees at most four shapes.
    """
    full_passes, rest = divmod(rows, max_rows)
    sizes = [max_rows] * full_passes
    if rest:
        candidates = [-(-max_rows // n) for n in (8, 4, 2, 1)]
        sizes.append(next(size for size in candidates if size >= rest))
    return sizes


def passes_of(rows: Sequence[list[T]], max_rows: int) -> list[list[list[T]]]:
    """Return the rows of each forward pass, as many as `pass_sizes` has; the last pass is filled with empty rows."""
    passes: list[list[list[T]]] = []
    start = 0
    for size in pass_sizes(len(rows), max_rows):
        part = list(rows[start : start + size])
        passes.append(part + [[] for _ in range(size - len(part))])
        start += size
    return passes


def lay_out(
    rows: Sequence[Sequence[TokenizedText]], sequence_length: int, num_boundaries: int, pad_token: int
) -> dict[str, Any]:
    """Convert rows of texts to the tensors of an `AnswerBatch`, on the CPU, by field name.

    num_boundaries: the length of cu_seqlens, which is padded to a constant shape.
    """
    shape = (len(rows), sequence_length)
    tokens, positions = np.full(shape, pad_token, np.int64), np.zeros(shape, np.int64)
    targets = np.full(shape, IGNORE, np.int64)
    starts: list[int] = []
    target_index: list[NDArray[np.int64]] = []
    for i, row in enumerate(rows):
        start = 0
        for text in row:
            end = start + text.num_inputs
            tokens[i, start:end] = text.tokens[:-1]
            predicting = start + text.targets - 1  # a token is predicted at the position before it
            targets[i, predicting] = text.tokens[text.targets]
            positions[i, start:end] = np.arange(text.num_inputs)
            starts.append(i * sequence_length + start)
            target_index.append(i * sequence_length + predicting)
            start = end
        if start < sequence_length:
            positions[i, start:] = np.arange(sequence_length - start)
            starts.append(i * sequence_length + start)
    cu_seqlens = np.full(num_boundaries, tokens.size, np.int32)
    cu_seqlens[: len(starts)] = starts
    lengths = np.array([len(index) for index in target_index], np.int64)
    mask = np.arange(lengths.max(initial=1)) < lengths[:, None]
    return {
        "tokens_BT": torch.from_numpy(tokens),
        "targets_BT": torch.from_numpy(targets),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "positions_BT": torch.from_numpy(positions),
        "target_index_M": torch.from_numpy(np.concatenate([*target_index, np.empty(0, np.int64)])),
        "mask_SL": torch.from_numpy(mask),
    }


def to_device(fields: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the tensors among the fields to the device, without synchronization."""
    copied = dict(fields)
    for name, value in fields.items():
        if isinstance(value, Tensor):
            pinned = value.pin_memory() if device.type == "cuda" else value
            copied[name] = pinned.to(device, non_blocking=device.type == "cuda")
    return copied


def worst_case_texts(sequence_length: int, num_texts: int, vocab_size: int) -> list[TokenizedText]:
    """Return random texts that fill a row and are scored from their second token on: the most expensive row."""
    generator = np.random.default_rng(0)
    cuts = np.linspace(0, sequence_length, num_texts + 1).astype(int)
    return [TokenizedText(generator.integers(vocab_size, size=n + 1), 1) for n in np.diff(cuts).tolist()]
