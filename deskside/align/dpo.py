"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

The loss (losses.py) compares the model with a reference model, whose weights are those that the run starts from. The
reference's log-probabilities never change, so they are computed once before the first step, and no second model is in
memory. They are cached with the data under a checksum of the weights, so that another run, for example with a different
learning rate, reuses them. Runs with adapters work the same way: before its first step, an adapted model equals its
base model.

A step's loss is the mean over its pairs. Metrics reported in training and on held-out pairs: the implicit rewards of
both answers, their margin, the accuracy (share of pairs where the chosen answer has the larger reward; a tie counts
half, so a run starts near 0.5), and `kl`: k3 (losses.py) per token of the answers, which estimates KL(reference ||
model) if the answers are typical samples of the reference.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor

from deskside.align import answers
from deskside.align.answers import AnswerBatch, check_supported, lay_out, to_device, worst_case_texts
from deskside.align.losses import pair_losses
from deskside.align.preference_data import PairRows, text_indices
from deskside.align.prepared import describe_data
from deskside.align.samples import AlignObjective
from deskside.config.align import DpoConfig
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.corpus.progress_bar import ProgressBar
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.train.objective import Batches, Evaluation, Loss, RowDataset, Session
from deskside.train.prepare.preflight import EVALUATE_SHARE, REPORT_SHARE, SAMPLE_SHARE
from deskside.utils.errors import RunError
from deskside.utils.files import replace_atomically

# File in the run directory with the cache key of the reference log-probabilities, and the rows used if not all.
REFERENCE = "reference.json"
METRICS: tuple[str, ...] = ("chosen_reward", "rejected_reward", "accuracy", "kl", "scored_tokens")


@dataclass(frozen=True)
class PairBatch(AnswerBatch):
    """A batch in which texts 2p and 2p + 1 are the chosen and rejected answer of pair p.

    reference_SL: log-probabilities of the answers' tokens under the reference model.
    """

    reference_SL: Tensor


class Dpo(AlignObjective):
    """Direct preference optimization; implements `train.objective.Objective`."""

    name, command, metric_names, evaluate_first = "dpo", "deskside dpo", METRICS, True

    def __init__(self, options: DpoConfig) -> None:
        self.options = options
        self.datasets: dict[str, PairRows] = {}
        # Reference log-probabilities of the scored tokens of all texts, concatenated, by split.
        self.reference: dict[str, NDArray[np.float32]] = {}

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PairRows:
        check_supported(config)
        self.datasets[split] = PairRows(path, split, sequence_length, config.model.vocab_size)
        self.folder = path
        return self.datasets[split]

    def begin(self, session: Session) -> None:
        describe_data(self.datasets["train"].index, session.say)
        for dataset in self.datasets.values():
            if dataset.left_out:
                session.say(
                    f"{dataset.split}: {dataset.left_out:,} pairs do not fit into a row of {dataset.sequence_length} "
                    "tokens and are left out; a longer --batch.sequence_length includes them"
                )
        key, rows_used = self._find_reference(session)
        for split, count in (rows_used or {}).items():
            session.say(
                f"{split}: {count:,} of {self.datasets[split].num_rows:,} rows of pairs are used, so that the run ends "
                "on time; a longer run (--hours) uses more"
            )
            self.datasets[split].subsample(count)
        path = self._reference_path(key)
        if session.world.broadcast_result(path.is_file):
            session.say("the reference log-probabilities of an earlier run from the same weights are reused")
        elif session.resumed:
            raise RunError(
                f"{path}: the reference log-probabilities are missing, and cannot be computed from weights that have "
                f"been trained; restore the file, or start a new run"
            )
        else:
            session.say("computing the reference log-probabilities of all pairs, once")
            with session.precision.high_precision():
                logprobs = {
                    split: self._reference_logprobs(session, rows) for split, rows in self.datasets.items()
                }
            if session.world.is_rank_zero:
                _save_reference(path, logprobs)
        session.world.barrier()
        self.reference = load_file(path)
        if not session.resumed:
            if session.world.is_rank_zero:
                session.run.write_json(REFERENCE, {"key": key, **({"rows": rows_used} if rows_used else {})})
            self.sample_before(session)

    def loader(self, dataset: RowDataset, options: LoaderOptions) -> Batches:
        return _PairLoader(self, cast(PairRows, dataset), options)

    def dry_batch(
        self,
        dataset: RowDataset,
        rows: int,
        passes_everywhere: int,
        device: torch.device,
        document_mask: bool,
    ) -> Batch:
        texts = [worst_case_texts(dataset.sequence_length, 2, dataset.vocab_size) for _ in range(rows)]
        return self._batch(cast(PairRows, dataset), texts, None, rows * passes_everywhere, device)

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        batch = cast(PairBatch, batch)
        scores = answers.score(model, batch, context, compute)
        loss_P, metric_sums = self._losses_and_metrics(scores.logprobs_SL, batch)
        return Loss(loss_P.sum(), scores.router, metric_sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        chosen, rejected = sums["chosen_reward"] / count, sums["rejected_reward"] / count
        return {
            "accuracy": sums["accuracy"] / count,
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "kl": sums["kl"] / max(1.0, sums["scored_tokens"]),
        }

    def evaluate(self, session: Session, max_tokens: int | None) -> Evaluation:
        rows = cast(PairRows, session.validation)
        sums = dict.fromkeys(("loss", *METRICS, "pairs", "rows"), 0.0)
        for indices in _evaluated_rows(rows, session, max_tokens):
            batch = self._batch_of(rows, [rows.rows[i] for i in indices], 1, session.world.device)
            with torch.no_grad():
                scores = answers.score(
                    session.model, batch, answers.evaluation_context(session, batch), session.config.compute
                )
                loss_P, metric_sums = self._losses_and_metrics(scores.logprobs_SL, batch)
            for name, value in {"loss": loss_P.sum(), **metric_sums}.items():
                sums[name] += float(value)
            sums["pairs"] += len(loss_P)
            sums["rows"] += len(indices)
        totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=session.world.device)
        sums = dict(zip(sums, session.world.all_reduce_sum(totals).tolist(), strict=True))
        pairs = int(sums["pairs"])
        metrics = {f"val_{name}": value for name, value in self.metrics(sums, pairs).items()}
        metrics["val_loss"] = sums["loss"] / pairs
        message = (
            f"{metrics['val_accuracy']:.1%} of {pairs:,} held-out pairs ranked correctly, margin "
            f"{metrics['val_margin']:.3f}, KL {metrics['val_kl']:.4f} per token"
        )
        tokens = int(sums["rows"]) * rows.sequence_length
        return Evaluation(metrics, {**metrics, "val_pairs": pairs}, message, tokens)

    # Batches

    def _losses_and_metrics(self, logprobs_SL: Tensor, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair, and the sums of the reported metrics."""
        tokens_S = batch.mask_SL.sum(1)
        losses = pair_losses(logprobs_SL.sum(1), batch.reference_SL.sum(1), tokens_S, self.options)
        margin_P = losses.chosen_reward_P - losses.rejected_reward_P
        log_ratio_SL = logprobs_SL.detach() - batch.reference_SL
        metric_sums = {
            "chosen_reward": losses.chosen_reward_P.sum(),
            "rejected_reward": losses.rejected_reward_P.sum(),
            "accuracy": ((margin_P > 0).float() + 0.5 * (margin_P == 0)).sum(),
            "kl": ((log_ratio_SL.exp() - log_ratio_SL - 1) * batch.mask_SL).sum(),
            "scored_tokens": tokens_S.sum().float(),
        }
        return losses.loss_P, metric_sums

    def _batch_of(
        self, rows: PairRows, pairs: list[NDArray[np.int64]], step_pairs: int, device: torch.device
    ) -> PairBatch:
        """Return a batch. pairs: pair indices of each row. step_pairs: pairs in the whole step on all ranks."""
        reference = self.reference.get(rows.split)
        logprobs = None
        if reference is not None:
            starts = rows.scored_start
            logprobs = [reference[starts[text] : starts[text + 1]] for text in text_indices(pairs)]
        return self._batch(rows, rows.texts_of(pairs), logprobs, step_pairs, device)

    def _batch(
        self,
        rows: PairRows,
        texts: list[Any],
        reference: list[NDArray[np.float32]] | None,
        step_pairs: int,
        device: torch.device,
    ) -> PairBatch:
        fields = lay_out(texts, rows.sequence_length, rows.max_boundaries(len(texts)) + 1, rows.pad_token)
        reference_SL = torch.zeros(fields["mask_SL"].shape)
        if reference:
            reference_SL[fields["mask_SL"]] = torch.from_numpy(np.concatenate(reference))
        pairs = sum(len(row) for row in texts) // 2
        return PairBatch(
            **to_device({**fields, "reference_SL": reference_SL}, device),
            num_valid=pairs,
            num_valid_step=step_pairs,
        )

    # Reference log-probabilities

    def _reference_logprobs(self, session: Session, rows: PairRows) -> NDArray[np.float32]:
        """Compute the reference log-probabilities of all texts' scored tokens, concatenated; 0 for unused rows."""
        logprobs = torch.zeros(int(rows.scored_start[-1]), dtype=torch.float32)
        with ProgressBar(
            f"reference, {rows.split}", rows.num_rows, "rows", quiet=not session.world.is_rank_zero
        ) as bar:
            for indices in _evaluated_rows(rows, session, None):
                self._score_reference(session, rows, indices, logprobs)
                bar.advance(len(indices) * session.world.size)
        # Each rank wrote the entries of its own rows; the others are zero.
        return np.asarray(session.world.all_reduce_sum(logprobs.to(session.world.device)).cpu().numpy())

    def _score_reference(self, session: Session, rows: PairRows, indices: list[int], out: Tensor) -> None:
        """Write the reference log-probabilities of these rows into `out`, which holds those of all texts."""
        pairs = [rows.rows[i] for i in indices]
        batch = self._batch_of(rows, pairs, 1, session.world.device)
        with torch.no_grad():
            scores = answers.score(
                session.model, batch, answers.evaluation_context(session, batch), session.config.compute
            )
        values = scores.logprobs_SL[batch.mask_SL].float().cpu()
        offset = 0
        for text in text_indices(pairs):
            first, last = int(rows.scored_start[text]), int(rows.scored_start[text + 1])
            out[first:last] = values[offset : offset + last - first]
            offset += last - first

    def _find_reference(self, session: Session) -> tuple[str, dict[str, int] | None]:
        """Return the cache key, and the number of rows of each split that the cached file covers (None: all)."""
        if session.resumed:
            recorded = session.run.read_json(REFERENCE)
            return str(recorded["key"]), recorded.get("rows")
        key = self._cache_key(session)
        if session.world.broadcast_result(self._reference_path(key).is_file):
            return key, None
        with session.precision.high_precision():
            rows = self._affordable_rows(session)
        return (key, None) if rows is None else (f"{key}-{rows['train']}-{rows['val']}", rows)

    def _affordable_rows(self, session: Session) -> dict[str, int] | None:
        """Return the rows of each split that a time-limited run can use, or None for all.

        A training row costs a forward pass for the reference, and its part of a step. A held-out row costs three
        forward passes: for the reference, and for the evaluations before and after training. Raises UsageError if there
        is no time for one optimizer step.
        """
        budget, train, val = session.budget, self.datasets["train"], self.datasets["val"]
        if budget.limit is None:
            return None
        pass_seconds = self._pass_seconds(session, train)
        val_rows = max(1, min(val.num_rows, int(budget.share(EVALUATE_SHARE) / pass_seconds)))
        later = budget.share(2 * SAMPLE_SHARE + REPORT_SHARE) + 3 * val_rows * pass_seconds
        step_rows = session.config.batch.tokens // train.sequence_length
        train_rows = int((budget.left() - later) / (pass_seconds + session.row_seconds))
        val_rows, train_rows = (int(n) for n in session.world.broadcast([val_rows, train_rows]))
        if train_rows < min(step_rows, train.num_rows):
            raise budget.too_short(
                f"a step takes {step_rows * session.row_seconds:.1f} s, the reference log-probabilities of its pairs "
                f"take {step_rows * pass_seconds:.1f} s, and {max(0.0, budget.left() - later):.0f} s are left",
                step_rows * (session.row_seconds + pass_seconds),
                later,
            )
        train_rows = min(train_rows, train.num_rows)
        if (train_rows, val_rows) == (train.num_rows, val.num_rows):
            return None
        return {"train": train_rows, "val": val_rows}

    def _pass_seconds(self, session: Session, rows: PairRows) -> float:
        """Measure the seconds of a forward pass per row, if all ranks share the rows."""
        unused = torch.zeros(int(rows.scored_start[-1]), dtype=torch.float32)
        indices = next(iter(_evaluated_rows(rows, session, None)))
        seconds = 0.0
        for _ in range(2):  # the first pass compiles on a GPU
            began = time.perf_counter()
            self._score_reference(session, rows, indices, unused)
            seconds = time.perf_counter() - began
            if session.world.device.type == "cpu":
                break
        return session.world.broadcast([seconds / (len(indices) * session.world.size)])[0]

    def _reference_path(self, key: str) -> Path:
        return self.datasets["train"].directory / "reference" / f"{key}.safetensors"

    def _cache_key(self, session: Session) -> str:
        """Return a hash of weights, data, sequence length and activation dtype.

        The run records it, because a resumed run no longer has the initial weights.
        """
        digest = xxhash.xxh3_128(self.datasets["train"].fingerprint.encode())
        digest.update(f"{session.model.activation_dtype} {self.datasets['train'].sequence_length}".encode())
        for name, tensor in sorted(session.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return str(session.world.broadcast_result(digest.hexdigest))


def _evaluated_rows(rows: PairRows, session: Session, max_tokens: int | None) -> Iterator[list[int]]:
    """Yield the indices of this rank's rows, one micro-batch at a time.

    The ranks share all rows, or evenly spaced ones of about `max_tokens` tokens.
    """
    count = rows.num_rows
    if max_tokens is not None:
        count = min(count, max(session.world.size, max_tokens // rows.sequence_length))
    indices = (np.arange(count) * rows.num_rows // count)[session.world.rank :: session.world.size].tolist()
    for first in range(0, len(indices), session.micro_rows):
        yield indices[first : first + session.micro_rows]


def _save_reference(path: Path, logprobs: Mapping[str, NDArray[np.float32]]) -> None:
    """Save the reference log-probabilities by split. Raises RunError if the file cannot be written."""
    with replace_atomically(path) as temporary:
        path.parent.mkdir(exist_ok=True)
        save_file(dict(logprobs), temporary)


class _PairLoader:
    """Iterator over optimizer steps. The rows of a step are a function of seed and position, as in pretraining."""

    def __init__(self, objective: Dpo, rows: PairRows, options: LoaderOptions):
        self.objective, self.rows, self.options, self.position = objective, rows, options, options.start_row

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        options = self.options
        pairs = self.rows.pairs_at(
            options.seed, np.arange(self.position, self.position + options.rows_per_step)
        )
        self.position += options.rows_per_step
        step_pairs = sum(len(row) for row in pairs)
        rank_rows = options.rows_per_step // options.world_size
        pairs = pairs[options.rank * rank_rows : (options.rank + 1) * rank_rows]
        return [
            self.objective._batch_of(
                self.rows, pairs[i : i + options.micro_batch_rows], step_pairs, options.device
            )
            for i in range(0, rank_rows, options.micro_batch_rows)
        ]

    def close(self) -> None:
        pass
