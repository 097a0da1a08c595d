"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306), on answers that are desirable or not.

The loss (preference_losses.py) compares the log-ratio of an answer with z, an estimate of KL(model || reference). As in
TRL, z is the mean log-ratio of answers to other questions (labelled_data.py), at least 0. It is computed without
gradient with the weights before the step, over all answers of the step on all processes, so that the loss depends
neither on packing nor on gradient accumulation; TRL's is that of a micro-batch. This costs one more forward pass.

Metrics reported in training and on held-out answers: the mean implicit rewards of desirable (`chosen_reward`) and
undesirable answers (`rejected_reward`), their margin, and `kl`, which is z. Those of a step without answers of a label
are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from deskside.align import answers
from deskside.align.answers import AnswerBatch, check_supported, passes_of, to_device, worst_case_texts
from deskside.align.labelled_data import LabelledRows
from deskside.align.preference_losses import kl_estimate, labelled_losses
from deskside.align.prepared import describe_data
from deskside.align.reference import Reference, score_texts, seconds_per_row
from deskside.align.samples import AlignObjective
from deskside.align.text_rows import StepLoader, TextRows, Units, evaluation_sums, rows_of_rank
from deskside.config.align import KtoConfig
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.train.objective import Batches, Evaluation, Loss, RowDataset, Session

METRICS: tuple[str, ...] = ("chosen_reward", "rejected_reward", "chosen", "rejected", "kl")


@dataclass(frozen=True)
class LabelledBatch(AnswerBatch):
    """A micro-batch of S labelled answers.

    reference_S: summed log-probabilities of the answers under the reference model. desirable_S: bool, the labels. kl:
    scalar, the step's estimate of KL(model || reference).
    """

    reference_S: Tensor
    desirable_S: Tensor
    kl: Tensor


class Kto(AlignObjective):
    """Kahneman-Tversky optimization; implements `train.objective.Objective`."""

    name, command, metric_names, evaluate_first = "kto", "deskside kto", METRICS, True
    reads_weights = True  # for the estimate of the KL divergence

    def __init__(self, options: KtoConfig) -> None:
        self.options = options
        self.datasets: dict[str, LabelledRows] = {}
        self.kl_seconds = 0.0  # of a step

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> LabelledRows:
        check_supported(config)
        self.datasets[split] = LabelledRows(path, split, sequence_length, config.model.vocab_size)
        self.folder = path
        return self.datasets[split]

    def begin(self, session: Session) -> None:
        self.session = session
        train = self.datasets["train"]
        describe_data(train.index, session.say)
        session.say(
            f"{train.index['splits']['train']['desirable']:,} of the answers to train on are desirable"
        )
        for dataset in self.datasets.values():
            dataset.tell_left_out(session.say)
        self.reference = Reference(self.datasets)
        row_seconds = session.row_seconds
        if session.budget.limit is not None:
            kl_seconds = seconds_per_row(
                session, train, lambda indices: self._kl_sum([train.rows[i] for i in indices], train)
            )
            row_seconds += kl_seconds
            self.kl_seconds = kl_seconds * session.config.batch.tokens / train.sequence_length
        self.reference.prepare(session, row_seconds)
        if not session.resumed:
            self.sample_before(session)

    def extra_step_seconds(self) -> float:
        return self.kl_seconds

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches:
        return StepLoader(self, cast(LabelledRows, dataset), options)

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        labelled = cast(LabelledRows, dataset)
        texts = [worst_case_texts(dataset.sequence_length, 1, dataset.vocab_size) for _ in range(rows)]
        fields = labelled.lay_out(texts) | {
            "reference_S": torch.zeros(rows),
            "desirable_S": torch.ones(rows, dtype=torch.bool),
            "kl": torch.zeros(()),
        }
        return LabelledBatch(
            **to_device(fields, device), num_valid=rows, num_valid_step=rows * passes_everywhere
        )

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        batch = cast(LabelledBatch, batch)
        scores = answers.score(model, batch, context, compute)
        desirable_S = batch.desirable_S
        losses = labelled_losses(
            scores.logprobs_SL.sum(1), batch.reference_S, desirable_S, batch.kl, self.options
        )
        metric_sums = {
            "chosen_reward": (losses.reward_S * desirable_S).sum(),
            "rejected_reward": (losses.reward_S * ~desirable_S).sum(),
            "chosen": desirable_S.sum().float(),
            "rejected": (~desirable_S).sum().float(),
            "kl": batch.kl * len(desirable_S),  # summed over the step's answers, like the others
        }
        return Loss(losses.loss_S.sum(), scores.router, metric_sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        metrics = {"kl": sums["kl"] / count}
        for kind in ("chosen", "rejected"):
            if sums[kind]:
                metrics[f"{kind}_reward"] = sums[f"{kind}_reward"] / sums[kind]
        if len(metrics) == 3:
            metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        return metrics

    def evaluate(self, session: Session, max_tokens: int | None) -> Evaluation:
        rows, world = cast(LabelledRows, session.validation), session.world
        mine = [rows.rows[i] for part in rows_of_rank(rows, session, max_tokens) for i in part]
        count = int(world.all_reduce_sum(torch.tensor(sum(len(row) for row in mine), device=world.device)))
        kl = self._kl(mine, rows, count)

        def measure(units: Units) -> Mapping[str, Tensor]:
            batch = self._batch(rows, units, kl, count, world.device)
            context = answers.evaluation_context(session, batch)
            loss = self.loss(session.model, batch, context, session.config.compute)
            return {"loss": loss.sum, **loss.metric_sums}

        sums, tokens = evaluation_sums(rows, session, max_tokens, ("loss", *METRICS), measure)
        metrics = {f"val_{name}": value for name, value in self.metrics(sums, count).items()}
        metrics["val_loss"] = sums["loss"] / count
        margin = f", margin {metrics['val_margin']:.3f}" if "val_margin" in metrics else ""
        message = f"loss {metrics['val_loss']:.4f} on {count:,} held-out answers{margin}, KL {metrics['val_kl']:.3f}"
        return Evaluation(metrics, {**metrics, "val_answers": count}, message, tokens)

    # Batches

    def step_batches(
        self, rows: TextRows, mine: Units, step: Units, micro_rows: int, device: torch.device
    ) -> list[Batch]:
        labelled, count = cast(LabelledRows, rows), sum(len(row) for row in step)
        with self.session.precision.high_precision():
            kl = self._kl(mine, labelled, count)
        return [
            self._batch(labelled, mine[i : i + micro_rows], kl, count, device)
            for i in range(0, len(mine), micro_rows)
        ]

    def _batch(
        self, rows: LabelledRows, units: Units, kl: Tensor, step_count: int, device: torch.device
    ) -> LabelledBatch:
        text_rows = rows.own_texts(units)
        texts = [index for row in text_rows for index in row]
        fields = rows.lay_out([[rows.text(index) for index in row] for row in text_rows]) | {
            "reference_S": self.reference.sums(rows, texts),
            "desirable_S": torch.from_numpy(rows.desirable[[index // 2 for index in texts]]),
        }
        return LabelledBatch(
            **to_device(fields, device), kl=kl, num_valid=len(texts), num_valid_step=step_count
        )

    # KL divergence

    def _kl(self, units: Units, rows: LabelledRows, count: int) -> Tensor:
        """Return the estimate of KL(model || reference) over the units of all ranks, `count` in all."""
        return kl_estimate(self.session.world.all_reduce_sum(self._kl_sum(units, rows)), count).float()

    def _kl_sum(self, units: Units, rows: LabelledRows) -> Tensor:
        """Return the sum of the log-ratios of the answers of other records after the questions of these units."""
        session = self.session
        total = torch.zeros((), dtype=torch.float64, device=session.world.device)
        for part in passes_of(rows.other_texts(units), session.micro_rows):
            logprobs_SL, _ = score_texts(session, rows, part)
            texts = [index for row in part for index in row]
            total += logprobs_SL.sum(dtype=torch.float64) - self.reference.sums(rows, texts).sum(
                dtype=torch.float64
            )
        return total
