"""Bits per byte: how many bits the model needs for each byte of text, whatever its tokenizer.

    bits per byte = sum of -log p(token) over the tokens of the text, in nats / ln 2 / bytes of that text

Loss per token cannot be compared between tokenizers, because a larger vocabulary has fewer and harder tokens for the
same text; bytes are the same for all. Special tokens are not text. They are inputs, so that the first word of a
document is predicted from the end-of-text token, but as targets they are left out of the nats as well as of the bytes:
the end of a document is not part of its text, and other tokenizers have no such token to compare with.

A document longer than a row is cut into pieces that do not overlap, where training cuts it too. A piece's first token
is predicted from the last token of the piece before it, with nothing else carried over. So each token of the text is
predicted exactly once, and a longer row gives a lower number, because fewer tokens lack their context.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from deskside.data.reading.loader import Batch, validation_batches
from deskside.data.reading.packing import cut
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.data.tokenizer import encode
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError

NARROWEST = (
    32  # tokens; pieces of text are padded to a power of two from here on, so that shapes rarely change
)
AS_IS = AttentionContext()


@dataclass(frozen=True)
class WorkShare:
    """A process's share of an evaluation. reduce: sums a float64 tensor over all processes, in place."""

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], object] | None = None


ALONE = WorkShare()


@dataclass(frozen=True)
class BitsPerByte:
    """Summed -log p in nats, bytes of text, and tokens of text.

    target_nats and targets count every target, special tokens too; of a data set alone.
    """

    nats: float
    bytes: int
    tokens: int
    target_nats: float = 0.0
    targets: int = 0

    @property
    def bpb(self) -> float:
        """Bits per byte."""
        return self.nats / math.log(2) / self.bytes

    @property
    def loss(self) -> float:
        """Nats per token of text."""
        return self.nats / self.tokens


def evaluate_dataset(
    model: Transformer,
    dataset: PackedDataset,
    *,
    micro_rows: int,
    max_tokens: int | None = None,
    attention: AttentionContext = AS_IS,
    document_mask: bool = False,
    share: WorkShare = ALONE,
    tick: Callable[[int], object] | None = None,
) -> BitsPerByte:
    """Measure bits per byte of a packed split, `micro_rows` rows at a time.

    max_tokens: about as many, in rows spread evenly over the split; None takes all. attention: names the backends.
    document_mask: documents that are packed into one row do not see each other; off, they do, as in training without
    it. share: every process runs the model equally often, because sharded models wait for each other. `tick` is called
    with each batch's number of targets, for a progress bar.
    Raises UsageError when the split holds no text, RunError when the model's output is not finite.
    """
    device = model.embed.weight.device
    bytes_V = torch.from_numpy(dataset.token_bytes.astype(np.int64)).to(device)
    batches = validation_batches(dataset, micro_rows, "cpu", max_rows_of(dataset, max_tokens), document_mask)
    totals = torch.zeros(5, dtype=torch.float64)
    for batch, counted in _batches_of(batches, share):
        targets_BT = batch.targets_BT.to(device)
        if not counted:
            targets_BT = torch.full_like(targets_BT, IGNORE)
        bytes_BT = torch.where(targets_BT == IGNORE, 0, bytes_V[targets_BT.clamp(min=0)])
        context, positions_BT = attention, None
        if batch.cu_seqlens is not None and batch.positions_BT is not None:
            length = batch.tokens_BT.shape[1]
            context = replace(attention, cu_seqlens=batch.cu_seqlens.to(device), max_seqlen=length)
            positions_BT = batch.positions_BT.to(device)
        losses_BT = model.token_losses(batch.tokens_BT.to(device), targets_BT, context, positions_BT)
        text_BT = bytes_BT > 0
        all_BT = targets_BT != IGNORE
        sums = _sums(losses_BT * text_BT, bytes_BT, text_BT)
        totals += torch.cat([sums, torch.stack([losses_BT.double().sum(), all_BT.double().sum()]).cpu()])
        if tick is not None:
            tick(batch.num_valid)
    if share.reduce is not None:
        share.reduce(totals)
    return _result(totals, "the validation split")


def max_rows_of(dataset: PackedDataset, max_tokens: int | None) -> int | None:
    """Return how many rows hold about `max_tokens`; None for all."""
    return None if max_tokens is None else max(1, max_tokens // dataset.sequence_length)


def evaluate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    start_token: int,
    texts: Iterable[str],
    *,
    sequence_length: int,
    batch_tokens: int,
    attention: AttentionContext = AS_IS,
) -> BitsPerByte:
    """Measure bits per byte of plain documents. Each begins with `start_token` and is independent of the others.

    The bytes are those of the text in UTF-8. About `batch_tokens` tokens go through the model at a time. Raises
    UsageError for a sequence length that the model does not have, or no text; RunError for output that is not finite.
    """
    if not 2 <= sequence_length <= model.config.max_position_embeddings:
        raise UsageError(
            f"sequence length {sequence_length}: this model takes 2 to {model.config.max_position_embeddings} tokens"
        )
    device = model.embed.weight.device
    totals = torch.zeros(3, dtype=torch.float64)
    text_bytes = 0

    def counted() -> Iterator[str]:
        nonlocal text_bytes
        for text in texts:
            text_bytes += len(text.encode("utf-8"))
            yield text

    pieces = _pieces(counted(), tokenizer, start_token, sequence_length)
    for inputs, targets in _rectangles(pieces, sequence_length, batch_tokens, start_token):
        targets_BT = torch.from_numpy(targets).to(device)
        losses_BT = model.token_losses(torch.from_numpy(inputs).to(device), targets_BT, attention)
        text_BT = targets_BT != IGNORE
        totals += _sums(losses_BT, torch.zeros_like(targets_BT), text_BT)
    totals[1] = text_bytes
    return _result(totals, "the input")


def _batches_of(batches: Iterable[Batch], share: WorkShare) -> Iterator[tuple[Batch, bool]]:
    """Yield this process's batches. Processes with fewer batches repeat the last one, which is not counted."""
    number, last = 0, None
    for number, last in enumerate(batches, start=1):
        if (number - 1) % share.size == share.rank:
            yield last, True
    over = number % share.size
    if over and share.rank >= over and last is not None:
        yield last, False


def _sums(losses_BT: Tensor, bytes_BT: Tensor, text_BT: Tensor) -> Tensor:
    """Return (nats, bytes, tokens), float64 on the CPU."""
    return torch.stack([losses_BT.double().sum(), bytes_BT.double().sum(), text_BT.double().sum()]).cpu()


def _result(totals: Tensor, what: str) -> BitsPerByte:
    nats, size, tokens, *all_targets = totals.tolist()
    if not size or not tokens:
        raise UsageError(f"{what} holds no text to evaluate")
    if not math.isfinite(nats):
        raise RunError(f"the model's loss on {what} is {nats}: its weights or its activations are not finite")
    return BitsPerByte(nats, int(size), int(tokens), *all_targets[:1], *map(int, all_targets[1:]))


def _pieces(
    texts: Iterable[str], tokenizer: Tokenizer, start_token: int, sequence_length: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield (inputs, targets) of every piece of every document, at most `sequence_length` tokens each."""
    for text in texts:
        ids = encode(tokenizer, text)
        stream = np.concatenate(([start_token], ids.astype(np.int64)))
        starts, lengths = cut(np.array([0]), np.array([len(ids)]), sequence_length)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            yield stream[start : start + length], stream[start + 1 : start + length + 1]


def _rectangles(
    pieces: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
    sequence_length: int,
    batch_tokens: int,
    padding: int,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Batch pieces of similar length, padded on the right to one of few shapes (rows, width)."""
    waiting: dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for piece in pieces:
        width = min(sequence_length, max(NARROWEST, 1 << (len(piece[0]) - 1).bit_length()))
        group = waiting.setdefault(width, [])
        group.append(piece)
        if len(group) == max(1, batch_tokens // width):
            yield _padded(waiting.pop(width), len(group), width, padding)
    for width, group in waiting.items():
        yield _padded(group, max(1, batch_tokens // width), width, padding)


def _padded(
    group: list[tuple[NDArray[np.int64], NDArray[np.int64]]], rows: int, width: int, padding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    inputs = np.full((rows, width), padding, dtype=np.int64)
    targets = np.full((rows, width), IGNORE, dtype=np.int64)
    for row, (tokens, next_tokens) in enumerate(group):
        inputs[row, : len(tokens)] = tokens
        targets[row, : len(next_tokens)] = next_tokens
    return inputs, targets
