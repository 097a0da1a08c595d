"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

The loss (losses.py) compares the model with a reference, the weights that the run starts from. The reference's
log-probabilities never change, so they are computed once before the first step, and cached beside the data under
the weights' checksum: another run with a different learning rate reuses them, and no second model is in memory.
This holds for adapters as well, because a run with adapters starts as its base model.

A step's loss is the mean over its pairs. Reported metrics, in training and on held-out pairs: the implicit rewards
of both answers, their margin, the accuracy (share of pairs where the chosen answer has the larger reward; a tie
counts half, so a run starts at 0.5), and `kl`: k3 per token of the answers, an estimate of KL(reference || model)
if the answers are typical samples of the reference.
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
from deskside.align.answers import AnswerBatch, check_compute, full_row_texts, lay_out, moved
from deskside.align.losses import pair_scores
from deskside.align.preference_data import PairRows
from deskside.align.prepared import describe_data
from deskside.align.samples import SampledAnswers
from deskside.config.align import DpoConfig
from deskside.config.run import RunConfig
from deskside.config.sections import ComputeConfig
from deskside.data.corpus.progress_bar import ProgressBar
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.train.objective import Batches, Evaluation, Loss, RowDataset, Session
from deskside.train.prepare.preflight import MEASURE_SHARE, REPORT_SHARE, SAMPLE_SHARE
from deskside.utils.errors import RunError
from deskside.utils.files import replace_atomically

REFERENCE = "reference.json"  # in the run directory: the key of its reference log-probabilities
EXTRAS: tuple[str, ...] = ("chosen_reward", "rejected_reward", "accuracy", "kl", "scored_tokens")


@dataclass(frozen=True)
class PairBatch(AnswerBatch):
    """A batch in which texts 2p and 2p + 1 are a pair. reference_SL: log-probabilities of the reference."""

    reference_SL: Tensor


class Dpo(SampledAnswers):
    """The DPO objective; see the module and `train.objective.Objective`."""

    name, command, extras, measured_first = "dpo", "deskside dpo", EXTRAS, True

    def __init__(self, options: DpoConfig) -> None:
        self.options = options
        self.opened: dict[str, PairRows] = {}
        self.reference: dict[str, NDArray[np.float32]] = {}  # scored tokens of all texts, by split
        self.train: list[PairRows] = []  # of every stage

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PairRows:
        check_compute(config)
        self.opened[split] = PairRows(path, split, sequence_length, config.model.vocab_size)
        self.folder = path
        if split == "train":
            self.train.append(self.opened[split])
        return self.opened[split]

    def begin(self, session: Session) -> None:
        describe_data(self.opened["train"].index, session.say)
        for opened in self.opened.values():
            if opened.left_out:
                session.say(
                    f"{opened.split}: {opened.left_out:,} pairs do not fit a row of {opened.sequence_length} tokens "
                    "and are left out; a longer --batch.sequence_length takes them in"
                )
        key, rows = self._find_reference(session)
        for split, count in (rows or {}).items():
            session.say(
                f"{split}: {count:,} of {self.opened[split].num_rows:,} rows of pairs are used, so that the run ends "
                "on time; more --hours take in more"
            )
            self.opened[split].restrict(count)
        path = self._reference_path(key)
        if session.world.broadcast_result(path.is_file):
            session.say("the reference's log-probabilities are those of an earlier run from the same weights")
        elif session.resumed:
            raise RunError(
                f"{path}: the log-probabilities of the reference are missing, and the starting weights have been "
                f"trained since; restore the file, or start a new run"
            )
        else:
            session.say("the reference's log-probabilities of all pairs are computed once")
            with session.precision.high_precision():
                found = {split: self._log_reference(session, rows) for split, rows in self.opened.items()}
            if session.world.is_rank_zero:
                _keep(path, found)
        session.world.barrier()
        self.reference = load_file(path)
        if not session.resumed:
            if session.world.is_rank_zero:
                session.run.write_json(REFERENCE, {"key": key, **({"rows": rows} if rows else {})})
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
        texts = [full_row_texts(dataset.sequence_length, 2, dataset.vocab_size) for _ in range(rows)]
        return self._batch(cast(PairRows, dataset), texts, None, rows * passes_everywhere, device)

    def loss(
        self, model: Transformer, batch: Batch, context: AttentionContext, compute: ComputeConfig
    ) -> Loss:
        batch = cast(PairBatch, batch)
        found = answers.score(model, batch, context, compute)
        loss_P, extra = self._compare(found.logprobs_SL, batch)
        return Loss(loss_P.sum(), found.balance, extra)

    def row(self, extra: Mapping[str, float], count: float) -> dict[str, float]:
        chosen, rejected = extra["chosen_reward"] / count, extra["rejected_reward"] / count
        return {
            "accuracy": extra["accuracy"] / count,
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "kl": extra["kl"] / max(1.0, extra["scored_tokens"]),
        }

    def measure(self, session: Session, max_tokens: int | None) -> Evaluation:
        rows = cast(PairRows, session.validation)
        sums = dict.fromkeys(("loss", *EXTRAS), 0.0)
        pairs = seen = 0
        for numbers in _spread(rows, session, max_tokens):
            batch = self._batch_of(rows, [rows.rows[n] for n in numbers], 1, session.world.device)
            with torch.no_grad():
                scores = answers.score(
                    session.model, batch, answers.evaluation_context(session, batch), session.config.compute
                )
                loss_P, extra = self._compare(scores.logprobs_SL, batch)
            for name, value in {"loss": loss_P.sum(), **extra}.items():
                sums[name] += float(value)
            pairs, seen = pairs + len(loss_P), seen + len(numbers)
        names = list(sums)
        totals = torch.tensor(
            [*(sums[n] for n in names), pairs, seen], dtype=torch.float64, device=session.world.device
        )
        *values, pairs, seen = session.world.all_reduce_sum(totals).tolist()
        total = dict(zip(names, values, strict=True))
        row = {f"val_{k}": v for k, v in self.row(total, pairs).items()} | {"val_loss": total["loss"] / pairs}
        said = (
            f"{row['val_accuracy']:.1%} of {int(pairs):,} held-out pairs the right way round, margin "
            f"{row['val_margin']:.3f}, KL {row['val_kl']:.4f} per token"
        )
        return Evaluation(row, {**row, "val_pairs": int(pairs)}, said, int(seen) * rows.sequence_length)

    # Parts

    def _compare(self, logprobs_SL: Tensor, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair, and the sums of the reported metrics."""
        tokens_S = batch.mask_SL.sum(1)
        found = pair_scores(logprobs_SL.sum(1), batch.reference_SL.sum(1), tokens_S, self.options)
        margin_P = found.chosen_reward_P - found.rejected_reward_P
        apart_SL = logprobs_SL.detach() - batch.reference_SL
        extra = {
            "chosen_reward": found.chosen_reward_P.sum(),
            "rejected_reward": found.rejected_reward_P.sum(),
            "accuracy": ((margin_P > 0).float() + 0.5 * (margin_P == 0)).sum(),
            "kl": ((apart_SL.exp() - apart_SL - 1) * batch.mask_SL).sum(),
            "scored_tokens": tokens_S.sum().float(),
        }
        return found.loss_P, extra

    def _batch_of(
        self, rows: PairRows, pairs: list[NDArray[np.int64]], everywhere: int, device: torch.device
    ) -> PairBatch:
        """Return a batch of rows. everywhere: number of pairs in the whole step on all ranks."""
        starts = rows.scored_start
        numbers = [2 * int(p) + side for row in pairs for p in row for side in (0, 1)]
        reference = self.reference.get(rows.split)
        values = None if reference is None else [reference[starts[n] : starts[n + 1]] for n in numbers]
        return self._batch(rows, rows.texts_of(pairs), values, everywhere, device)

    def _batch(
        self,
        rows: PairRows,
        texts: list[Any],
        reference: list[NDArray[np.float32]] | None,
        everywhere: int,
        device: torch.device,
    ) -> PairBatch:
        fields = lay_out(texts, rows.sequence_length, rows.max_boundaries(len(texts)) + 1, rows.filler)
        reference_SL = torch.zeros(fields["mask_SL"].shape)
        if reference:
            reference_SL[fields["mask_SL"]] = torch.from_numpy(np.concatenate(reference))
        pairs = sum(len(row) for row in texts) // 2
        return PairBatch(
            **moved({**fields, "reference_SL": reference_SL}, device),
            num_valid=pairs,
            num_valid_step=everywhere,
        )

    def _log_reference(self, session: Session, rows: PairRows) -> NDArray[np.float32]:
        """Compute the reference's log-probabilities of the scored tokens of every text, concatenated."""
        found = torch.zeros(int(rows.scored_start[-1]), dtype=torch.float32)
        with ProgressBar(
            f"reference, {rows.split}", rows.num_rows, "rows", quiet=not session.world.is_rank_zero
        ) as bar:
            for numbers in _spread(rows, session, None):
                self._score_reference(session, rows, numbers, found)
                bar.advance(len(numbers) * session.world.size)
        return np.asarray(session.world.all_reduce_sum(found.to(session.world.device)).cpu().numpy())

    def _score_reference(self, session: Session, rows: PairRows, numbers: list[int], found: Tensor) -> None:
        """Compute the reference's log-probabilities for these rows."""
        pairs = [rows.rows[n] for n in numbers]
        batch = self._batch_of(rows, pairs, 1, session.world.device)
        with torch.no_grad():
            scores = answers.score(
                session.model, batch, answers.evaluation_context(session, batch), session.config.compute
            )
        values = scores.logprobs_SL[batch.mask_SL].float().cpu()
        at = 0
        for number in (2 * int(p) + side for row in pairs for p in row for side in (0, 1)):
            first, last = int(rows.scored_start[number]), int(rows.scored_start[number + 1])
            found[first:last] = values[at : at + last - first]
            at += last - first

    def _find_reference(self, session: Session) -> tuple[str, dict[str, int] | None]:
        """Return the cache key, and the number of rows that it covers in each split (None: all)."""
        if session.resumed:
            recorded = session.run.read_json(REFERENCE)
            return str(recorded["key"]), recorded.get("rows")
        key = self._key(session)
        if session.world.broadcast_result(self._reference_path(key).is_file):
            return key, None
        with session.precision.high_precision():
            rows = self._affordable(session)
        return (key, None) if rows is None else (f"{key}-{rows['train']}-{rows['val']}", rows)

    def _affordable(self, session: Session) -> dict[str, int] | None:
        """Return the rows of each split that a time-limited run can use, or None for all.

        Each training row costs a forward pass of the reference and a training step; each held-out row three forward
        passes, the reference and two evaluations. Raises UsageError if there is no time for one optimizer step.
        """
        budget, train, val = session.budget, self.opened["train"], self.opened["val"]
        if budget.limit is None:
            return None
        pass_seconds = self._pass_seconds(session, train)
        val_rows = max(1, min(val.num_rows, int(budget.share(MEASURE_SHARE) / pass_seconds)))
        later = budget.share(2 * SAMPLE_SHARE + REPORT_SHARE) + 3 * val_rows * pass_seconds
        step_rows = session.config.batch.tokens // train.sequence_length
        train_rows = int((budget.left() - later) / (pass_seconds + session.row_seconds))
        val_rows, train_rows = (int(n) for n in session.world.broadcast([val_rows, train_rows]))
        if train_rows < min(step_rows, train.num_rows):
            raise budget.too_short(
                f"a step takes {step_rows * session.row_seconds:.1f} s and the reference of its pairs "
                f"{step_rows * pass_seconds:.1f} s, and {max(0.0, budget.left() - later):.0f} s are left",
                step_rows * (session.row_seconds + pass_seconds),
                later,
            )
        if train_rows >= train.num_rows or len(self.train) > 1:  # each stage packs the pairs into other rows
            train_rows = train.num_rows
        if (train_rows, val_rows) == (train.num_rows, val.num_rows):
            return None
        return {"train": train_rows, "val": val_rows}

    def _pass_seconds(self, session: Session, rows: PairRows) -> float:
        """Measure the seconds of a forward pass per row, with the rows shared by all ranks."""
        found = torch.zeros(int(rows.scored_start[-1]), dtype=torch.float32)
        numbers = next(iter(_spread(rows, session, None)))
        seconds = 0.0
        for _ in range(2):  # the first pass compiles on a GPU
            began = time.perf_counter()
            self._score_reference(session, rows, numbers, found)
            seconds = time.perf_counter() - began
            if session.world.device.type == "cpu":
                break
        return session.world.broadcast([seconds / (len(numbers) * session.world.size)])[0]

    def _reference_path(self, key: str) -> Path:
        return self.opened["train"].directory / "reference" / f"{key}.safetensors"

    def _key(self, session: Session) -> str:
        """Return a key of weights, data and activation dtype, which is recorded: a resumed run has other weights."""
        digest = xxhash.xxh3_128(self.opened["train"].fingerprint.encode())
        digest.update(f"{session.model.activation_dtype} {self.opened['train'].sequence_length}".encode())
        for name, tensor in sorted(session.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return str(session.world.broadcast_result(digest.hexdigest))


def _spread(rows: PairRows, session: Session, max_tokens: int | None) -> Iterator[list[int]]:
    """Yield this rank's share of all rows, or of about `max_tokens` spread over them, one micro-batch at a time."""
    wanted = rows.num_rows
    if max_tokens is not None:
        wanted = min(wanted, max(session.world.size, max_tokens // rows.sequence_length))
    numbers = (np.arange(wanted) * rows.num_rows // wanted)[session.world.rank :: session.world.size].tolist()
    for first in range(0, len(numbers), session.micro_rows):
        yield numbers[first : first + session.micro_rows]


def _keep(path: Path, found: Mapping[str, NDArray[np.float32]]) -> None:
    """Save the log-probabilities of the reference model. Raises RunError when the file cannot be written."""
    with replace_atomically(path) as temporary:
        path.parent.mkdir(exist_ok=True)
        save_file(dict(found), temporary)


class _PairLoader:
    """A loader of optimizer steps. The rows of a step are a function of seed and position, as in pretraining."""

    def __init__(self, objective: Dpo, rows: PairRows, options: LoaderOptions):
        self.objective, self.rows, self.options, self.at = objective, rows, options, options.start_row

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        options = self.options
        pairs = self.rows.pairs_at(options.seed, np.arange(self.at, self.at + options.rows_per_step))
        self.at += options.rows_per_step
        everywhere = sum(len(row) for row in pairs)
        mine = options.rows_per_step // options.world_size
        pairs = pairs[options.rank * mine : (options.rank + 1) * mine]
        return [
            self.objective._batch_of(
                self.rows, pairs[i : i + options.micro_batch_rows], everywhere, options.device
            )
            for i in range(0, mine, options.micro_batch_rows)
        ]

    def close(self) -> None:
        pass
