"""Pretraining as an objective: predict the next token of a text."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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
from deskside.model.transformer import Transformer
from deskside.run.record import LANGUAGE_METRIC
from deskside.train.objective import Batches, Evaluation, Loss, RowDataset, Session
from deskside.train.text_rows import open_text
from deskside.train.text_samples import sample_text
from deskside.train.time_budget import SAMPLE_SHARE


def worst_case_batch(
    dataset: RowDataset, rows: int, passes_everywhere: int, device: torch.device, document_mask: bool
) -> Batch:
    """Return a batch of the shapes that the loader yields, with random tokens and one document per row."""
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
    # Weights of the future targets in the current step, always in the same memory
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
        """Return the future targets of a batch with their current weights; None if all weights are 0."""
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
        return sample_text(model, dataset, session.run, session.config.seed, seconds)
