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

Pretraining is in `next_token.py`; the others are in `align/`. `RunConfig.align` names the objective of a run, and the
command that starts or resumes the run passes it in.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.ops.moe import RouterStatistics
from deskside.precision.convert import QuantizedModel
from deskside.run.directory import RunDirectory
from deskside.train.attention_backends import AttentionBackends
from deskside.train.parallel import World
from deskside.train.time_budget import UNLIMITED, TimeBudget


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

    `tokens` is how many of the split's `num_tokens` were evaluated, from which the loop predicts the time of a whole
    evaluation. `baselines` returns the summary's gzip and unigram entries for the same part of the split; None if the
    summary has the right ones already.
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
        """Return the seconds that a step spends outside of its passes, such as in sampling. Call it after `begin`."""

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
