"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) and its variants, on pairs of answers.

The losses (preference_losses.py) compare the model with a reference model, of which only log-probabilities are kept
(reference.py). ORPO, SimPO and CPO need none, so nothing is computed before their first step.

A step's loss is the mean over its pairs. `align.nll_weight` times the negative log-likelihood of the chosen answers is
added, a mean over their tokens in the step; for ORPO, as in TRL, over those of the questions before them too.

Metrics reported in training and on held-out pairs: the implicit rewards of both answers, their margin, the accuracy
(share of pairs where the chosen answer has the larger reward; a tie counts half, so a run with a reference starts near
0.5), with a reference `kl`: k3 (policy_loss.py) per token of the answers, which estimates KL(reference || model) if the
answers are typical samples of the reference, and with align.nll_weight `nll`: the negative log-likelihood per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from deskside.align import answers
from deskside.align.answers import AnswerBatch, TokenizedText, check_supported, to_device, worst_case_texts
from deskside.align.preference_data import PairRows, text_indices
from deskside.align.preference_losses import pair_losses
from deskside.align.prepared import describe_data
from deskside.align.reference import Reference
from deskside.align.samples import AlignObjective
from deskside.align.text_rows import StepLoader, TextRows, Units, evaluation_sums
from deskside.config.align import DpoConfig
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.train.objective import Batches, Evaluation, Loss, RowDataset, Session

METRICS: tuple[str, ...] = (
    "chosen_reward", "rejected_reward", "accuracy", "kl", "scored_tokens", "nll", "nll_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class PairBatch(AnswerBatch):
    """A batch in which texts 2p and 2p + 1 are the chosen and rejected answer of pair p.

    reference_SL: log-probabilities of the scored tokens under the reference model, None without one. answer_SL: bool,
    the scored tokens that belong to an answer; others belong to a question. nll_tokens_step: the tokens of the whole
    step that the negative log-likelihood is averaged over.
    """

    reference_SL: Tensor | None
    answer_SL: Tensor
    nll_tokens_step: int


class Dpo(AlignObjective):
    """Direct preference optimization; implements `train.objective.Objective`."""

    name, command, metric_names, evaluate_first = "dpo", "deskside dpo", METRICS, True

    def __init__(self, options: DpoConfig) -> None:
        self.options = options
        self.datasets: dict[str, PairRows] = {}
        self.reference: Reference | None = None
        self.scores_questions = options.loss == "orpo" and options.nll_weight > 0

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PairRows:
        check_supported(config)
        self.datasets[split] = PairRows(path, split, sequence_length, config.model.vocab_size)
        self.folder = path
        return self.datasets[split]

    def begin(self, session: Session) -> None:
        describe_data(self.datasets["train"].index, session.say)
        for dataset in self.datasets.values():
            dataset.tell_left_out(session.say)
        if not self.options.reference_free:
            self.reference = Reference(self.datasets)
            self.reference.prepare(session, session.row_seconds)
        if not session.resumed:
            self.sample_before(session)

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches:
        return StepLoader(self, cast(PairRows, dataset), options)

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        texts = [worst_case_texts(dataset.sequence_length, 2, dataset.vocab_size) for _ in range(rows)]
        return self._batch(cast(PairRows, dataset), texts, None, (rows * passes_everywhere, 1), device)

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        batch = cast(PairBatch, batch)
        scores = answers.score(model, batch, context, compute)
        loss_P, nll, metric_sums = self._losses_and_metrics(scores.logprobs_SL, batch)
        total = loss_P.sum()
        if self.options.nll_weight:
            # The trainer divides the sum by the pairs of the step, but this is a mean over tokens.
            total = total + self.options.nll_weight * batch.num_valid_step / batch.nll_tokens_step * nll
        return Loss(total, scores.router, metric_sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        chosen, rejected = sums["chosen_reward"] / count, sums["rejected_reward"] / count
        metrics = {
            "accuracy": sums["accuracy"] / count,
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        if not self.options.reference_free:
            metrics["kl"] = sums["kl"] / max(1.0, sums["scored_tokens"])
        if self.options.nll_weight:
            metrics["nll"] = sums["nll"] / max(1.0, sums["nll_tokens"])
        return metrics

    def evaluate(self, session: Session, max_tokens: int | None) -> Evaluation:
        rows = cast(PairRows, session.validation)

        def measure(units: Units) -> Mapping[str, Tensor | float]:
            batch = self._batch_of(rows, units, (1, 1), session.world.device)
            context = answers.evaluation_context(session, batch)
            scores = answers.score(session.model, batch, context, session.config.compute)
            loss_P, _, metric_sums = self._losses_and_metrics(scores.logprobs_SL, batch)
            return {"loss": loss_P.sum(), "pairs": len(loss_P), **metric_sums}

        sums, tokens = evaluation_sums(rows, session, max_tokens, ("loss", *METRICS, "pairs"), measure)
        pairs = int(sums["pairs"])
        found = self.metrics(sums, pairs)
        metrics = {f"val_{name}": value for name, value in found.items()}
        metrics["val_loss"] = sums["loss"] / pairs + self.options.nll_weight * found.get("nll", 0.0)
        message = (
            f"{metrics['val_accuracy']:.1%} of {pairs:,} held-out pairs ranked correctly, margin "
            f"{metrics['val_margin']:.3f}"
        )
        if not self.options.reference_free:
            message += f", KL {metrics['val_kl']:.4f} per token"
        return Evaluation(metrics, {**metrics, "val_pairs": pairs}, message, tokens)

    # Batches

    def _losses_and_metrics(
        self, logprobs_SL: Tensor, batch: PairBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss of each pair, the negative log-likelihood as a sum, and the sums of the reported metrics."""
        answer_SL, reference_SL = batch.answer_SL, batch.reference_SL
        tokens_S = answer_SL.sum(1)
        losses = pair_losses(
            (logprobs_SL * answer_SL).sum(1),
            None if reference_SL is None else reference_SL.sum(1),
            tokens_S,
            self.options,
        )
        margin_P = losses.chosen_reward_P - losses.rejected_reward_P
        nll = -logprobs_SL[0::2].sum()
        kl = torch.zeros_like(nll)
        if reference_SL is not None:
            log_ratio_SL = (logprobs_SL.detach() - reference_SL) * answer_SL
            kl = (log_ratio_SL.exp() - log_ratio_SL - 1).sum()
        metric_sums = {
            "chosen_reward": losses.chosen_reward_P.sum(),
            "rejected_reward": losses.rejected_reward_P.sum(),
            "accuracy": ((margin_P > 0).float() + 0.5 * (margin_P == 0)).sum(),
            "kl": kl.detach(),
            "scored_tokens": tokens_S.sum().float(),
            "nll": nll.detach(),
            "nll_tokens": batch.mask_SL[0::2].sum().float(),
        }
        return losses.loss_P, nll, metric_sums

    def step_batches(
        self, rows: TextRows, mine: Units, step: Units, micro_rows: int, device: torch.device
    ) -> list[Batch]:
        pairs = cast(PairRows, rows)
        counts = sum(len(row) for row in step), pairs.chosen_tokens(step, self.scores_questions)
        return [
            self._batch_of(pairs, mine[i : i + micro_rows], counts, device)
            for i in range(0, len(mine), micro_rows)
        ]

    def _batch_of(
        self, rows: PairRows, units: Units, step_counts: tuple[int, int], device: torch.device
    ) -> PairBatch:
        """Return the batch of rows of pairs. step_counts: see `_batch`."""
        texts = [[self._text(rows, index) for index in row] for row in rows.reference_texts(units)]
        reference = None
        if self.reference is not None:
            reference = torch.from_numpy(self.reference.of_texts(rows, text_indices(units)))
        return self._batch(rows, texts, reference, step_counts, device)

    def _text(self, rows: PairRows, index: int) -> TokenizedText:
        text = rows.text(index)
        if self.scores_questions and index % 2 == 0:
            return TokenizedText(text.tokens, text.answer_start, np.arange(1, len(text.tokens)))
        return text

    def _batch(
        self,
        rows: PairRows,
        texts: list[list[TokenizedText]],
        reference: Tensor | None,
        step_counts: tuple[int, int],
        device: torch.device,
    ) -> PairBatch:
        """Return the batch of rows of texts.

        reference: log-probabilities of the answers, concatenated; None if they are not known, or not needed.
        step_counts: pairs in the whole step on all ranks, and tokens of its negative log-likelihood.
        """
        fields: dict[str, Any] = rows.lay_out(texts)
        flat = [text for row in texts for text in row]
        mask_SL = fields["mask_SL"]
        # The scored tokens of a question come before those of its answer.
        of_question_S = torch.tensor([int((text.targets < text.answer_start).sum()) for text in flat])
        fields["answer_SL"] = mask_SL & (torch.arange(mask_SL.shape[1]) >= of_question_S[:, None])
        fields["reference_SL"] = None if self.options.reference_free else torch.zeros(mask_SL.shape)
        if reference is not None:
            fields["reference_SL"][fields["answer_SL"]] = reference
        return PairBatch(
            **to_device(fields, device),
            num_valid=len(flat) // 2,
            num_valid_step=step_counts[0],
            nll_tokens_step=step_counts[1],
        )
