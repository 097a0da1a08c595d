"""Bits per byte: a loss that can be compared between models with different tokenizers.

    bits per byte = sum of -ln p(token) over the tokens of the text / ln 2 / bytes of the text

The loss per token depends on the tokenizer: a larger vocabulary has fewer tokens for the same text, which are harder to
predict. Special tokens are inputs, so the first word of a document is predicted from the end-of-text token. As targets
they are excluded: the end of a document is not part of its text, and other tokenizers may have no such token.

A document longer than a row is cut into pieces that do not overlap, as in training. Within its document, the first
token of a piece sees only the last token of the previous piece. So each token is predicted exactly once, and longer
rows usually give lower values, because fewer tokens lack context.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from deskside.data.encoder import ReferenceEncoder, encode
from deskside.data.reading.loader import Batch, validation_batches
from deskside.data.reading.packing import cut
from deskside.data.reading.rows import IGNORE, PackedDataset
from deskside.data.tokenizer import token_bytes
from deskside.evaluate.choices import ExpertChoices
from deskside.evaluate.positions import PositionBucket, PositionSums
from deskside.kernels.attention import AttentionContext
from deskside.kernels.cross_entropy import CHUNK_TOKENS
from deskside.model.transformer import Transformer
from deskside.utils.errors import RunError, UsageError

# Pieces of text are padded to a power of two from here on, or to a whole row, so that there are few shapes.
MIN_WIDTH = 32
DEFAULT_ATTENTION = AttentionContext()


@dataclass(frozen=True)
class WorkShare:
    """A process's share of an evaluation. reduce: sums a float64 tensor over all processes, in place."""

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], object] | None = None


SINGLE_PROCESS = WorkShare()


@dataclass(frozen=True)
class BitsPerByte:
    """The result of an evaluation.

    Attributes:
        nats: Sum of -ln p over the tokens of text.
        bytes: Bytes of text.
        tokens: Tokens of text.
        target_nats, targets: The same sum and the number of targets, including special tokens. Only for a data set.
        by_position: nats, bytes and tokens by position in the row or document.
        by_language: nats, bytes and tokens of the text in each language, if there is more than one.
        expert_load: Each expert's share of the choices, by language, layer and expert; see `ExpertChoices`.
    """

    nats: float
    bytes: int
    tokens: int
    target_nats: float = 0.0
    targets: int = 0
    by_position: tuple[PositionBucket, ...] = ()
    by_language: dict[str, "BitsPerByte"] = field(default_factory=dict)
    expert_load: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def bpb(self) -> float:
        """Bits per byte."""
        return self.nats / math.log(2) / self.bytes

    @property
    def loss(self) -> float:
        """Loss per token of text, in nats."""
        return self.nats / self.tokens

    def languages_as_dict(self) -> dict[str, dict[str, float]]:
        """Return {language: {"bpb", "loss", "tokens", "bytes"}} for JSON."""
        return {
            language: {"bpb": one.bpb, "loss": one.loss, "tokens": one.tokens, "bytes": one.bytes}
            for language, one in self.by_language.items()
        }


def evaluate_dataset(
    model: Transformer,
    dataset: PackedDataset,
    *,
    micro_rows: int,
    max_tokens: int | None = None,
    attention: AttentionContext = DEFAULT_ATTENTION,
    document_mask: bool = False,
    share: WorkShare = SINGLE_PROCESS,
    tick: Callable[[int], object] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> BitsPerByte:
    """Measure bits per byte of a packed split.

    Args:
        micro_rows: Rows per forward pass.
        max_tokens: Evaluate about this many tokens, in rows spread evenly over the split; None for all.
        attention: The attention backends.
        document_mask: Mask attention between the documents of a row, as training does with the same option.
        share: This process's share. All processes run the same number of forward passes, because sharded models
            synchronize in each of them.
        tick: Called with the number of targets of each batch, for a progress bar.
        chunk_tokens: Tokens whose logits are computed at a time.

    Raises UsageError if the split contains no text, RunError if the model's output is not finite.
    """
    device = model.embed.weight.device
    bytes_V = torch.from_numpy(dataset.token_bytes.astype(np.int64)).to(device)
    batches = validation_batches(dataset, micro_rows, "cpu", max_rows_of(dataset, max_tokens), document_mask)
    # nats, bytes and tokens of text, nats and number of all targets, then nats, bytes and tokens of each language
    languages = dataset.languages if len(dataset.languages) > 1 else []
    totals = torch.zeros(5 + 3 * len(languages), dtype=torch.float64)
    by_position = PositionSums(dataset.sequence_length)
    choices = ExpertChoices(model, languages)
    for batch, counts in _batches_of(batches, share):
        targets_BT = batch.targets_BT.to(device)
        if not counts:
            targets_BT = torch.full_like(targets_BT, IGNORE)
        bytes_BT = torch.where(targets_BT == IGNORE, 0, bytes_V[targets_BT.clamp(min=0)])
        context, positions_BT = attention, None
        if batch.cu_seqlens is not None and batch.positions_BT is not None:
            length = batch.tokens_BT.shape[1]
            context = replace(attention, cu_seqlens=batch.cu_seqlens.to(device), max_seqlen=length)
            positions_BT = batch.positions_BT.to(device)
        with choices:
            tokens_BT = batch.tokens_BT.to(device)
            losses_BT = model.token_losses(tokens_BT, targets_BT, context, positions_BT, chunk_tokens)
        text_BT = bytes_BT > 0
        choices.add(text_BT, batch.languages_BT if languages else None)
        all_BT = targets_BT != IGNORE
        by_position.add(losses_BT, bytes_BT, text_BT, positions_BT)
        sums = _sums(losses_BT * text_BT, bytes_BT, text_BT)
        totals[:5] += torch.cat([sums, torch.stack([losses_BT.double().sum(), all_BT.double().sum()]).cpu()])
        if batch.languages_BT is not None:
            totals[5:] += _sums_by_language(losses_BT, bytes_BT, batch.languages_BT, len(languages))
        if tick is not None:
            tick(batch.num_valid)
    if share.reduce is not None:
        share.reduce(totals)
        share.reduce(by_position.totals_K3)
        if choices.counts.numel():
            share.reduce(choices.counts)
    by_language = dict(zip(languages, totals[5:].reshape(3, -1).T, strict=True))
    result = _result(totals[:5], "the validation split", by_position, by_language)
    return replace(result, expert_load=choices.load())


def max_rows_of(dataset: PackedDataset, max_tokens: int | None) -> int | None:
    """Return the number of rows with about `max_tokens` tokens; None for all rows."""
    return None if max_tokens is None else max(1, max_tokens // dataset.sequence_length)


def evaluate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    start_token: int,
    texts: Iterable[tuple[str, str]],
    *,
    sequence_length: int,
    batch_tokens: int,
    attention: AttentionContext = DEFAULT_ATTENTION,
) -> BitsPerByte:
    """Measure bits per byte of documents in plain text. Each begins with `start_token`; bytes are counted in UTF-8.

    texts: (language, text) of each document. A forward pass has about `batch_tokens` tokens. Raises UsageError for a
    sequence length that the model does not support and if there is no text, RunError if the model's output is not
    finite.
    """
    if not 2 <= sequence_length <= model.config.max_position_embeddings:
        raise UsageError(
            f"sequence length {sequence_length}: this model takes 2 to {model.config.max_position_embeddings} tokens"
        )
    device = model.embed.weight.device
    bytes_V = _bytes_of(tokenizer, model.config.vocab_size).to(device)
    totals, by_position = torch.zeros(3, dtype=torch.float64), PositionSums(sequence_length)
    by_language: dict[str, Tensor] = {}  # nats, bytes and tokens

    def counted_texts() -> Iterator[tuple[str, str]]:
        for language, text in texts:
            size = len(text.encode("utf-8"))
            by_language.setdefault(language, torch.zeros(3, dtype=torch.float64))[1] += size
            totals[1] += size
            yield language, text

    pieces = _pieces(counted_texts(), tokenizer, start_token, sequence_length)
    for languages, inputs, targets in _length_batches(pieces, sequence_length, batch_tokens, start_token):
        targets_BT = torch.from_numpy(targets).to(device)
        losses_BT = model.token_losses(torch.from_numpy(inputs).to(device), targets_BT, attention)
        text_BT = targets_BT != IGNORE
        by_position.add(losses_BT, bytes_V[targets_BT.clamp(min=0)], text_BT, None)
        totals += _sums(losses_BT, torch.zeros_like(targets_BT), text_BT)
        rows = torch.stack([losses_BT.double().sum(1), text_BT.double().sum(1)], dim=1).cpu()
        for language, row in zip(languages, rows, strict=False):  # the last rows may be padding
            by_language[language][[0, 2]] += row
    return _result(totals, "the input", by_position, by_language)


def _bytes_of(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """Return the bytes of each token, (V,) int64; zeros if they are unknown."""
    bytes_V = torch.zeros(vocab_size, dtype=torch.int64)
    try:
        known = token_bytes(tokenizer)
    except UsageError:  # not byte-level BPE: by position, only the loss is known
        return bytes_V
    bytes_V[: len(known)] = torch.from_numpy(known.astype(np.int64))
    return bytes_V


def _batches_of(batches: Iterable[Batch], share: WorkShare) -> Iterator[tuple[Batch, bool]]:
    """Yield (batch, counts) of this process. Processes with fewer batches repeat the last one, which does not count."""
    num_batches, batch = 0, None
    for num_batches, batch in enumerate(batches, start=1):
        if (num_batches - 1) % share.size == share.rank:
            yield batch, True
    remainder = num_batches % share.size
    if remainder and share.rank >= remainder and batch is not None:
        yield batch, False


def _sums(losses_BT: Tensor, bytes_BT: Tensor, text_BT: Tensor) -> Tensor:
    """Return (nats, bytes, tokens), float64 on the CPU."""
    return torch.stack([losses_BT.double().sum(), bytes_BT.double().sum(), text_BT.double().sum()]).cpu()


def _sums_by_language(losses_BT: Tensor, bytes_BT: Tensor, languages_BT: Tensor, count: int) -> Tensor:
    """Return nats, bytes and tokens of text, each by language, concatenated; float64, shape [3 * count].

    They are summed on the CPU, because `torch.bincount` on a GPU adds in any order.
    """
    losses_BT, bytes_BT = losses_BT.cpu().double(), bytes_BT.cpu().double()
    text_BT = bytes_BT > 0
    languages, quantities = languages_BT[text_BT], (losses_BT, bytes_BT, text_BT.double())
    return torch.cat([torch.bincount(languages, values[text_BT], count) for values in quantities])


def _result(
    totals: Tensor, source: str, by_position: PositionSums, by_language: dict[str, Tensor]
) -> BitsPerByte:
    """Return the result of the sums. by_language: nats, bytes and tokens of each."""
    nats, num_bytes, tokens, *of_all_targets = totals.tolist()
    if not num_bytes or not tokens:
        raise UsageError(f"{source} holds no text to evaluate")
    if not math.isfinite(nats):
        raise RunError(
            f"the model's loss on {source} is {nats}: its weights or its activations are not finite"
        )
    target_nats, targets = of_all_targets or (0.0, 0)
    sums = {language: values.tolist() for language, values in sorted(by_language.items())}
    with_text = {name: BitsPerByte(n, int(b), int(t)) for name, (n, b, t) in sums.items() if b and t}
    return BitsPerByte(
        nats,
        int(num_bytes),
        int(tokens),
        target_nats,
        int(targets),
        by_position.buckets(),
        with_text if len(by_language) > 1 else {},
    )


Piece = tuple[str, NDArray[np.int64], NDArray[np.int64]]  # language, inputs and targets


def _pieces(
    texts: Iterable[tuple[str, str]], tokenizer: Tokenizer, start_token: int, sequence_length: int
) -> Iterator[Piece]:
    """Yield every piece of every document. A piece has at most `sequence_length` tokens."""
    for language, text in texts:
        ids = encode(ReferenceEncoder(tokenizer), text)
        stream = np.concatenate(([start_token], ids.astype(np.int64)))
        starts, lengths = cut(np.array([0]), np.array([len(ids)]), sequence_length)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            yield language, stream[start : start + length], stream[start + 1 : start + length + 1]


def _length_batches(
    pieces: Iterable[Piece],
    sequence_length: int,
    batch_tokens: int,
    padding: int,
) -> Iterator[tuple[list[str], NDArray[np.int64], NDArray[np.int64]]]:
    """Batch pieces of similar length, right-padded. There are only a few different shapes (rows, width).

    Yields the languages of the pieces, and inputs and targets, whose last rows may be padding.
    """
    waiting: dict[int, list[Piece]] = {}
    for piece in pieces:
        width = min(sequence_length, max(MIN_WIDTH, 1 << (len(piece[1]) - 1).bit_length()))
        group = waiting.setdefault(width, [])
        group.append(piece)
        if len(group) == max(1, batch_tokens // width):
            yield _padded(waiting.pop(width), len(group), width, padding)
    for width, group in waiting.items():
        yield _padded(group, max(1, batch_tokens // width), width, padding)


def _padded(
    group: list[Piece], rows: int, width: int, padding: int
) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    inputs = np.full((rows, width), padding, dtype=np.int64)
    targets = np.full((rows, width), IGNORE, dtype=np.int64)
    for row, (_, tokens, next_tokens) in enumerate(group):
        inputs[row, : len(tokens)] = tokens
        targets[row, : len(next_tokens)] = next_tokens
    return [language for language, _, _ in group], inputs, targets
