"""The interface between the training loop and its objective: pretraining, SFT, DPO, KTO or GRPO.

The loop handles steps, time, checkpoints and metrics. An objective handles its data, its loss and its evaluation:

    open       opens a split of the prepared data, as rows
    begin      is called once, before the first step
    loader     iterates over optimizer steps, which are lists of micro-batches
    set_progress  is called before every step
    loss       returns the loss of a micro-batch, as a sum, and sums for the metrics
    evaluate   evaluates the model on the validation split, during the run and at its end
    samples    generates samples with the finished model

The loop divides the summed loss by the batch's `num_valid_step`. The loader counts it over the whole step on all
processes (tokens, pairs or answers, depending on the objective), so the loss depends neither on packing nor on gradient
accumulation.

`NextToken` is pretraining. The others are in `align/`. `RunConfig.align` names the objective of a run, and the command
that starts or resumes the run passes it in.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig, MultiTokenConfig
from deskside.data.corpus.baselines import baselines_of_rows
from deskside.data.reading.loader import Batch, Loader, LoaderOptions, evaluated_rows, future_targets
from deskside.data.reading.rows import PackedDataset
from deskside.evaluate.bpb import BitsPerByte, WorkShare, evaluate_dataset, max_rows_of
from deskside.kernels.attention import AttentionContext
from deskside.kernels.cross_entropy import FutureTargets
from deskside.model.dropout import ResidualDropout
from deskside.model.transformer import Transformer
from deskside.ops.moe import RouterStatistics
from deskside.optim.average import WeightAverage
from deskside.precision.convert import QuantizedModel
from deskside.run.directory import RunDirectory
from deskside.run.record import LANGUAGE_METRIC
from deskside.train.loop.guard import Guard
from deskside.train.parallel import World
from deskside.train.prepare.attention_backends import AttentionBackends
from deskside.train.prepare.preflight import SAMPLE_SHARE, UNLIMITED, TimeBudget
from deskside.train.state import finalize
from deskside.train.text_rows import open_text


class RowDataset(Protocol):
    """A split in rows of `sequence_length` tokens, such as `PackedDataset`. An epoch is `num_rows` rows."""

    @property
    def sequence_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def max_boundaries(self, rows: int) -> int:
        """Return the maximum number of documents and padding segments in `rows` rows."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Return `Evaluation.tokens` of an evaluation of the whole split."""

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the data, independent of its path. A resumed run must find the same one."""


class Batches(Protocol):
    """Infinite iterator over optimizer steps, each a list of micro-batches (`Batch` or a subclass)."""

    def __iter__(self) -> Iterator[list[Batch]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Loss:
    """Loss of a micro-batch. `sum` is minimized; `router` has the statistics of the routers of a model with experts.

    `metric_sums` holds a detached scalar for each of the objective's `metric_names`. Like `sum`, they are summed over
    the step and all processes; `Objective.metrics` turns them into entries of metrics.jsonl.
    """

    sum: Tensor
    router: RouterStatistics | None = None
    metric_sums: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation: entries of metrics.jsonl and summary.json, and a message for the terminal.

    `tokens` of the split's `num_tokens` were evaluated, from which the loop predicts the time of a whole evaluation.
    `baselines` returns the summary's gzip and unigram entries for the same part of the split; None if the summary has
    the right ones.
    """

    metrics: dict[str, float]
    summary: dict[str, Any]
    message: str
    tokens: int
    baselines: Callable[[], dict[str, float | None]] | None = None


@dataclass(frozen=True)
class Session:
    """The parts of a run that its objective may use.

    `micro_rows`: rows that fit in one forward pass. `resumed`: an earlier process already called `begin`, so its files
    are in the run directory and the model's weights are not the initial ones. `say`: logs a line and prints it.
    `budget`: the time limit of the run; none for a resumed run. `row_seconds`: seconds of an optimizer step per row.
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
    """Data, loss and evaluation of a run; see the module docstring. Each process of a run has its own instance."""

    name: str
    """Name in `RunConfig.align.name`; "train" for pretraining."""
    command: str
    """Command that starts a run; `COMMAND --resume RUN` resumes it."""
    metric_names: tuple[str, ...]
    """Keys of every `Loss.metric_sums`."""
    evaluate_first: bool
    """True to evaluate the initial weights too ("before" in plan.json and summary.json)."""
    reads_weights: bool
    """True if the loader reads the model's weights, to sample with them."""

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> RowDataset:
        """Open a split, "train" or "val". Raises UsageError if it is missing or does not fit the model's vocabulary."""

    def begin(self, session: Session) -> None:
        """Prepare for the first step. The model still has its initial weights if the run is new.

        All processes call this together, after the batch size was found and before a checkpoint is restored.
        """

    def extra_step_seconds(self) -> float:
        """Return the seconds of a step for work besides its passes, such as sampling. Call it after `begin`."""

    def sampling_seconds(self) -> float:
        """Return the seconds that `samples` will take, as measured by `begin`; 0 if it was not measured."""

    def reserved_bytes(self, config: RunConfig, model: Transformer) -> int:
        """Return the GPU memory that `begin` will allocate and keep. The batch size search leaves it free."""

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches: ...

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        """Return the most expensive micro-batch of `rows` rows, made without reading data, for dry steps.

        passes_everywhere: number of micro-batches in the step, over all processes.
        """

    def set_progress(self, progress: float) -> None:
        """Set the progress of the run, 0 to 1, for the losses of the next step."""

    def pass_state(self) -> Hashable:
        """Return what the operations of `loss` depend on besides its arguments, apart from the values of tensors.

        A captured pass repeats the operations of its capture, so it is captured again when this changes.
        """

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss: ...

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Convert a step's metric sums to entries of metrics.jsonl. `count`: the batch's `num_valid_step`.

        An entry "loss" replaces the minimized loss in metrics.jsonl and in charts.
        """

    def evaluate(self, session: Session, max_tokens: int | None) -> Evaluation:
        """Evaluate on the validation split, or on about `max_tokens` spread over it.

        All processes call this together.
        """

    def samples(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        """Generate samples with the finished model, each {"prompt", "text", ...}.

        Only rank 0 calls this. `model`: the model with unsharded weights and merged adapters.
        """


def worst_case_batch(
    dataset: RowDataset, rows: int, passes_everywhere: int, device: torch.device, document_mask: bool
) -> Batch:
    """Return a batch with the shapes of the loader's, with random tokens and one document per row."""
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


def language_metrics(result: BitsPerByte) -> dict[str, float]:
    """Return the entries of metrics.jsonl for the bits per byte of each language."""
    return {f"{LANGUAGE_METRIC}{language}": one.bpb for language, one in result.by_language.items()}


class NextToken:
    """Pretraining: the loss is the cross-entropy of the next token, and the evaluation is in bits per byte.

    With `RunConfig.multi_token`, tokens after the next one are predicted too. Even then, the metric "loss" is that of
    the next token, so that loss curves can be compared; "future_token_loss" is the weighted sum of the others.
    """

    name, command, evaluate_first, reads_weights = "train", "deskside train", False, False
    metric_names: tuple[str, ...] = ()
    multi_token = MultiTokenConfig()
    progress = 0.0
    # Weights of the future targets in the present step, always in the same memory
    _weights_K: Tensor | None = None

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PackedDataset:
        self.multi_token = config.multi_token
        if self.multi_token.weights:
            self.metric_names = ("loss", "future_token_loss")
        return open_text(config, path, split, sequence_length)

    def begin(self, session: Session) -> None:
        pass

    def extra_step_seconds(self) -> float:
        return 0.0

    def sampling_seconds(self) -> float:
        return 0.0

    def reserved_bytes(self, config: RunConfig, model: Transformer) -> int:
        return 0

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches:
        options = replace(options, future_targets=len(self.multi_token.weights))
        return Loader(cast(PackedDataset, dataset), options)

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        batch = worst_case_batch(dataset, rows, passes_everywhere, device, document_mask)
        if count := len(self.multi_token.weights):
            positions_BT = torch.arange(batch.targets_BT.shape[1], device=device).expand_as(batch.targets_BT)
            targets_BTK = future_targets(batch.targets_BT, positions_BT, count)
            batch = replace(batch, future_targets_BTK=targets_BTK)
        return batch

    def set_progress(self, progress: float) -> None:
        self.progress = progress
        if self._weights_K is not None:
            self._set_weights(self._weights_K)

    def pass_state(self) -> Hashable:
        return self._has_future()

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        options: dict[str, Any] = {
            "context": context,
            "positions_BT": batch.positions_BT,
            "z_loss": compute.z_loss,
            "chunk_tokens": compute.loss_chunk_tokens,
        }
        if not self.multi_token.weights:
            return Loss(*model.loss_and_router(batch.tokens_BT, batch.targets_BT, **options))
        future = self._future(batch)
        if future is None:
            total, router = model.loss_and_router(batch.tokens_BT, batch.targets_BT, **options)
            next_token = total
        else:
            total, next_token, router = model.multi_token_loss(
                batch.tokens_BT, batch.targets_BT, future, **options
            )
        sums = {"loss": next_token.detach(), "future_token_loss": (total - next_token).detach()}
        return Loss(total, router, sums)

    def _future(self, batch: Batch) -> FutureTargets | None:
        """Return the future targets of a batch with their present weights; None if all weights are 0."""
        targets_BTK = batch.future_targets_BTK
        if targets_BTK is None or not self._has_future():
            return None
        if self._weights_K is None:
            self._weights_K = torch.empty(len(self.multi_token.weights), device=targets_BTK.device)
            self._set_weights(self._weights_K)
        return FutureTargets(targets_BTK.flatten(0, 1), self._weights_K)

    def _has_future(self) -> bool:
        """Return True if a token after the next one has a weight in this step."""
        return any(self.multi_token.at(self.progress))

    def _set_weights(self, weights_K: Tensor) -> None:
        for place, weight in enumerate(self.multi_token.at(self.progress)):
            weights_K[place].fill_(weight)  # unlike torch.tensor, does not wait for the GPU

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        return {name: total / count for name, total in sums.items()}

    def evaluate(self, session: Session, max_tokens: int | None) -> Evaluation:
        dataset = cast(PackedDataset, session.validation)
        result = self.bits_per_byte(session, dataset, max_tokens)
        split = dataset.index.splits["val"]
        summary = {
            "val_bpb": result.bpb,
            "val_loss": result.loss,
            "val_tokens": result.tokens,
            "val_bytes": result.bytes,
            "bpb_by_position": [bucket.as_dict() for bucket in result.by_position],
            "gzip_bpb": split.gzip_bpb,
            "unigram_bpb": split.unigram_bpb,
            "val_languages": result.languages_as_dict(),
            "val_expert_load": result.expert_load,
        }
        message = f"{result.bpb:.4f} bits per byte on the validation text"
        metrics, tokens = {"val_bpb": result.bpb, **language_metrics(result)}, result.targets
        if result.bytes == split.token_text_bytes:
            return Evaluation(metrics, summary, message, tokens)
        message = (
            f"{result.bpb:.4f} bits per byte on {result.bytes:,} of {split.text_bytes:,} bytes of validation"
        )
        rows = evaluated_rows(dataset, max_rows_of(dataset, max_tokens))
        return Evaluation(metrics, summary, message, tokens, lambda: baselines_of_rows(dataset, rows))

    def bits_per_byte(self, session: Session, dataset: PackedDataset, max_tokens: int | None) -> BitsPerByte:
        """Evaluate on a dataset, or on about `max_tokens` of it. The processes share the rows."""
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
            chunk_tokens=session.config.compute.loss_chunk_tokens,
        )

    def samples(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        dataset = cast(PackedDataset, session.validation)
        seconds = session.budget.share(SAMPLE_SHARE)
        return finalize.samples(model, dataset, session.run, session.config.seed, seconds)


@dataclass(kw_only=True)
class TrainContext:
    """A model that is ready to train in this process, with everything that a step needs besides the optimizer.

    is_compiled: torch.compile compiles the model or its blocks.
    """

    config: RunConfig
    world: World
    model: Transformer
    attention: AttentionBackends
    precision: QuantizedModel
    objective: Objective = field(default_factory=NextToken)
    is_compiled: bool = False
    average: WeightAverage | None = None

    def __post_init__(self) -> None:
        self.guard = Guard(self.config.guard)
        rate, seed = self.config.dropout, self.config.seed
        self.dropout = ResidualDropout(self.model, rate, seed) if rate else None
