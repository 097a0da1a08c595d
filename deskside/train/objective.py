"""The interface between the training loop and its objective: pretraining, SFT, DPO or GRPO.

The loop handles steps, time, checkpoints and metrics. An objective handles its data, its loss and its evaluation:

    open     a prepared split -> rows        loader  rows -> optimizer steps, as lists of micro-batches
    begin    once, before the first step     loss    a micro-batch -> a sum to minimise, and sums to report
    measure  during the run and at its end   samples what the finished model says

A loss is a sum. The loop divides it by the batch's `num_valid_step`, which the loader counts over the whole step on all
processes (tokens, pairs or samples, depending on the objective), so it depends neither on packing nor on accumulation.

`NextToken` is pretraining. The others are in `align/`. `RunConfig.align` names the objective of a run, and the command
that starts or resumes the run passes it in.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.corpus.baselines import baselines_of_rows
from deskside.data.reading.loader import Batch, Loader, LoaderOptions, evaluated_rows
from deskside.data.reading.rows import PackedDataset
from deskside.evaluate.bpb import BitsPerByte, WorkShare, evaluate_dataset, max_rows_of
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.precision.convert import QuantizedModel
from deskside.run.directory import RunDirectory
from deskside.train.loop.guard import Guard
from deskside.train.parallel import World
from deskside.train.prepare.attention_backends import AttentionBackends
from deskside.train.prepare.preflight import SAMPLE_SHARE, UNLIMITED, TimeBudget
from deskside.train.state import finalize
from deskside.utils.errors import UsageError


class RowDataset(Protocol):
    """A split, cut into rows of one length; `PackedDataset` is one. An epoch is `num_rows` rows."""

    @property
    def sequence_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def max_boundaries(self, rows: int) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Tokens that an evaluation of the whole split counts; see `Evaluation.tokens`."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data, independent of its path. A resumed run must find the same one."""


class Batches(Protocol):
    """Infinite iterator over optimizer steps, each a list of micro-batches (`Batch` or a subclass)."""

    def __iter__(self) -> Iterator[list[Batch]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Loss:
    """Loss of a micro-batch. `sum` is minimized; `balance` is the load-balancing loss of a model with experts.

    `extra` holds a scalar for each name in the objective's `extras`, detached. It is summed over the step and all
    processes like `sum`, and `Objective.row` turns it into entries of metrics.jsonl.
    """

    sum: Tensor
    balance: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation. `row` goes into metrics.jsonl, `summary` into summary.json, `said` to the terminal.

    `tokens` of the split's `num_tokens` were counted: the loop scales the time by it. `baselines` computes the entries
    of the summary that differ for a part of the split, so that they and the model are measured on the same bytes.
    """

    row: dict[str, float]
    summary: dict[str, Any]
    said: str
    tokens: int
    baselines: Callable[[], dict[str, float | None]] | None = None


@dataclass(frozen=True)
class Session:
    """The parts of a run that its objective may use.

    `micro_rows`: rows that fit in one forward pass. `resumed`: an earlier process already called `begin`, so its files
    are in the run directory and the model's weights are not the initial ones. `budget`: the time limit of set-up.
    `row_seconds`: seconds of an optimizer step per row.
    """

    run: RunDirectory
    config: RunConfig
    world: World
    model: Transformer
    attention: AttentionBackends
    precision: QuantizedModel
    validation: RowDataset
    micro_rows: int
    resumed: bool
    say: Callable[[str], None]
    budget: TimeBudget = UNLIMITED
    row_seconds: float = 0.0


class Objective(Protocol):
    """See the module. One object belongs to one run in one process."""

    name: str
    """Name in `RunConfig.align.name`; "train" for pretraining."""
    command: str
    """The command; `COMMAND --resume RUN` resumes a run."""
    extras: tuple[str, ...]
    """Names in `Loss.extra`, always all of them."""
    measured_first: bool
    """Whether the run is measured before its first step too ("before" in plan.json and summary.json)."""

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> RowDataset:
        """A split ("train" or "val"). Raises UsageError when it is not there, or the model cannot hold its tokens."""

    def begin(self, session: Session) -> None:
        """Called once in every process, after the batch size was found and before a checkpoint is restored.

        In a new run, the model has its initial weights. All processes call it together.
        """

    def seconds_beside_step(self) -> float:
        """Return the seconds that a step needs beside its passes, as sampling does; known after `begin`."""

    def samples_seconds(self) -> float:
        """Return the seconds that `samples` will take, as far as `begin` has measured them."""

    def keeps_bytes(self, config: RunConfig, model: Transformer) -> int:
        """Return the GPU memory that `begin` will allocate and keep; the micro-batch leaves room for it."""

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches: ...
    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        """Return the largest possible micro-batch, without reading data. The batch size search measures memory with
        it."""

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss: ...
    def row(self, extra: Mapping[str, float], count: float) -> dict[str, float]:
        """The step's sums -> what metrics.jsonl shows. `count`: the batch's `num_valid_step`."""

    def measure(self, session: Session, max_tokens: int | None) -> Evaluation:
        """On the validation split, or on about `max_tokens` spread over it. Every process calls it at the same time."""

    def samples(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        """Return samples of the finished model, each {"prompt", "text", ...}. Called on rank 0, where `model` is
        unsharded."""


def worst_case_batch(
    dataset: RowDataset, rows: int, passes_everywhere: int, device: torch.device, document_mask: bool
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


class NextToken:
    """Pretraining: cross-entropy of the next token, measured in bits per byte."""

    name, command, measured_first = "train", "deskside train", False
    extras: tuple[str, ...] = ()

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PackedDataset:
        weights = dict(config.data.weights) if split == "train" and config.data.weights else None
        dataset = PackedDataset(path, split=split, sequence_length=sequence_length, weights=weights)
        needed = dataset.index.tokenizer.vocab_size
        if needed > config.model.vocab_size:
            raise UsageError(
                f"model.vocab_size: {path} has {needed} tokens, the model {config.model.vocab_size}; "
                f"use --model.vocab_size {needed}, or prepare the data again"
            )
        return dataset

    def begin(self, session: Session) -> None:
        pass

    def seconds_beside_step(self) -> float:
        return 0.0

    def samples_seconds(self) -> float:
        return 0.0

    def keeps_bytes(self, config: RunConfig, model: Transformer) -> int:
        return 0

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches:
        return Loader(cast(PackedDataset, dataset), options)

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        return worst_case_batch(dataset, rows, passes_everywhere, device, document_mask)

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        total, balance = model.loss_and_balance(
            batch.tokens_BT,
            batch.targets_BT,
            context,
            positions_BT=batch.positions_BT,
            z_loss=compute.z_loss,
            chunk_tokens=compute.loss_chunk_tokens,
        )
        return Loss(total, balance)

    def row(self, extra: Mapping[str, float], count: float) -> dict[str, float]:
        return {name: total / count for name, total in extra.items()}

    def measure(self, session: Session, max_tokens: int | None) -> Evaluation:
        dataset = cast(PackedDataset, session.validation)
        result = self.evaluate(session, dataset, max_tokens)
        split = dataset.index.splits["val"]
        summary = {
            "val_bpb": result.bpb,
            "val_loss": result.loss,
            "val_tokens": result.tokens,
            "val_bytes": result.bytes,
            "gzip_bpb": split.gzip_bpb,
            "unigram_bpb": split.unigram_bpb,
        }
        said = f"{result.bpb:.4f} bits per byte on the validation text"
        if result.bytes == split.token_text_bytes:
            return Evaluation({"val_bpb": result.bpb}, summary, said, result.tokens)
        said = (
            f"{result.bpb:.4f} bits per byte on {result.bytes:,} of {split.text_bytes:,} bytes of validation"
        )
        rows = evaluated_rows(dataset, max_rows_of(dataset, max_tokens))
        return Evaluation(
            {"val_bpb": result.bpb}, summary, said, result.tokens, lambda: baselines_of_rows(dataset, rows)
        )

    def evaluate(self, session: Session, dataset: PackedDataset, max_tokens: int | None) -> BitsPerByte:
        """The measurement itself, shared among the processes."""
        return evaluate_dataset(
            session.model,
            dataset,
            micro_rows=session.micro_rows,
            max_tokens=max_tokens,
            attention=AttentionContext(
                backend=session.attention.full, window_backend=session.attention.windowed
            ),
            document_mask=session.config.data.document_mask,
            share=WorkShare(session.world.rank, session.world.size, session.world.all_reduce_sum),
        )

    def samples(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        dataset = cast(PackedDataset, session.validation)
        seconds = session.budget.share(SAMPLE_SHARE)
        return finalize.samples(model, dataset, session.run, session.config.seed, seconds)


@dataclass(kw_only=True)
class TrainContext:
    """A model that is ready to train in this process, and what its components share.

    The step, the trainer and the checkpointer take it instead of its parts.
    """

    config: RunConfig
    world: World
    model: Transformer
    attention: AttentionBackends
    precision: QuantizedModel
    objective: Objective = field(default_factory=NextToken)

    def __post_init__(self) -> None:
        self.guard = Guard(self.config.guard)
