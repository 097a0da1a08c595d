"""Log-probabilities of the data's texts under the reference model, which are the weights that a run starts from.

They never change, so they are computed once before the first step, and no second model is in memory. They are cached
with the data under a checksum of the model, so that another run, for example with a different learning rate, reuses
them. Runs with adapters work the same way: before its first step, an adapted model equals its base model.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor

from deskside.align import answers
from deskside.align.answers import AnswerBatch, to_device
from deskside.align.prepared import NOUN
from deskside.align.text_rows import TextRows, rows_of_rank
from deskside.train.objective import Session
from deskside.train.time_budget import EVALUATE_SHARE, REPORT_SHARE, SAMPLE_SHARE
from deskside.utils.errors import RunError
from deskside.utils.files import replace_atomically
from deskside.utils.progress import ProgressBar

# File in the run directory with the cache key of the reference log-probabilities, and the rows used if not all.
REFERENCE = "reference.json"


def score_texts(session: Session, rows: TextRows, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the model's log-probabilities of the answers of rows of texts, without gradient, and their mask.

    texts: text indices of each row. Both are of shape (S, L), as in `AnswerBatch`.
    """
    fields = rows.lay_out([[rows.text(index) for index in row] for row in texts])
    batch = AnswerBatch(**to_device(fields, session.world.device), num_valid=1, num_valid_step=1)
    with torch.no_grad():
        scores = answers.score(
            session.model, batch, answers.evaluation_context(session, batch), session.config.compute
        )
    return scores.logprobs_SL, batch.mask_SL


class Reference:
    """The reference log-probabilities of all splits. datasets: by split, "train" and "val"."""

    def __init__(self, datasets: Mapping[str, TextRows]):
        self.datasets = datasets
        # Of the answers of all texts, concatenated, by split.
        self.values: dict[str, NDArray[np.float32]] = {}

    def prepare(self, session: Session, row_seconds: float) -> None:
        """Compute the log-probabilities or read them from the cache, and drop rows that a limited run cannot use.

        row_seconds: of a row of training data in a step. Raises RunError if the cache is missing for a resumed run.
        """
        key, rows_used = self._find(session, row_seconds)
        for split, count in (rows_used or {}).items():
            rows = self.datasets[split]
            session.say(
                f"{split}: {count:,} of {rows.num_rows:,} rows of {NOUN[rows.kind]}s are used, so that the run ends "
                "on time; a longer run (--hours) uses more"
            )
            rows.subsample(count)
        path = self._path(key)
        if session.world.broadcast_result(path.is_file):
            session.say("the reference log-probabilities of an earlier run from the same weights are reused")
        elif session.resumed:
            raise RunError(
                f"{path}: the reference log-probabilities are missing, and cannot be computed from weights that have "
                f"been trained; restore the file, or start a new run"
            )
        else:
            noun = NOUN[self.datasets["train"].kind]
            session.say(f"computing the reference log-probabilities of all {noun}s, once")
            with session.precision.high_precision():
                logprobs = {split: self._compute(session, rows) for split, rows in self.datasets.items()}
            if session.world.is_rank_zero:
                _save(path, logprobs)
        session.world.barrier()
        self.values = load_file(path)
        if not session.resumed and session.world.is_rank_zero:
            session.run.write_json(REFERENCE, {"key": key, **({"rows": rows_used} if rows_used else {})})

    def of_texts(self, rows: TextRows, texts: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probabilities of the answers of these texts, concatenated. All are 0 before `prepare`."""
        lengths = np.diff(rows.scored_start)
        if rows.split not in self.values:
            return np.zeros(int(sum(lengths[index] for index in texts)), np.float32)
        values, starts = self.values[rows.split], rows.scored_start
        return np.concatenate([values[starts[index] : starts[index + 1]] for index in texts])

    def sums(self, rows: TextRows, texts: Sequence[int]) -> Tensor:
        """Return the log-probabilities of these texts' answers as a whole, (S,). All are 0 before `prepare`."""
        return torch.tensor([float(self.of_texts(rows, [index]).sum()) for index in texts])

    def _compute(self, session: Session, rows: TextRows) -> NDArray[np.float32]:
        """Compute the log-probabilities of the answers of a split; 0 for unused rows."""
        logprobs = torch.zeros(int(rows.scored_start[-1]), dtype=torch.float32)
        with ProgressBar(
            f"reference, {rows.split}", rows.num_rows, "rows", quiet=not session.world.is_rank_zero
        ) as bar:
            for indices in rows_of_rank(rows, session, None):
                self._score(session, rows, indices, logprobs)
                bar.advance(len(indices) * session.world.size)
        # Each rank wrote the entries of its own rows; the others are zero.
        return np.asarray(session.world.all_reduce_sum(logprobs.to(session.world.device)).cpu().numpy())

    def _score(self, session: Session, rows: TextRows, indices: list[int], out: Tensor) -> None:
        """Write the log-probabilities of the texts of these rows into `out`, which holds those of all texts."""
        text_rows = rows.reference_texts([rows.rows[i] for i in indices])
        for first in range(0, len(text_rows), session.micro_rows):
            part = text_rows[first : first + session.micro_rows]
            logprobs_SL, mask_SL = score_texts(session, rows, part)
            values = logprobs_SL[mask_SL].float().cpu()
            offset = 0
            for text in (index for row in part for index in row):
                begin, end = int(rows.scored_start[text]), int(rows.scored_start[text + 1])
                out[begin:end] = values[offset : offset + end - begin]
                offset += end - begin

    def _find(self, session: Session, row_seconds: float) -> tuple[str, dict[str, int] | None]:
        """Return the cache key, and the number of rows of each split that the cached file covers (None: all)."""
        if session.resumed:
            recorded = session.run.read_json(REFERENCE)
            return str(recorded["key"]), recorded.get("rows")
        key = self._cache_key(session)
        if session.world.broadcast_result(self._path(key).is_file):
            return key, None
        with session.precision.high_precision():
            rows = self._affordable_rows(session, row_seconds)
        return (key, None) if rows is None else (f"{key}-{rows['train']}-{rows['val']}", rows)

    def _affordable_rows(self, session: Session, row_seconds: float) -> dict[str, int] | None:
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
        train_rows = int((budget.left() - later) / (pass_seconds + row_seconds))
        val_rows, train_rows = (int(n) for n in session.world.broadcast([val_rows, train_rows]))
        if train_rows < min(step_rows, train.num_rows):
            raise budget.too_short(
                f"a step takes {step_rows * row_seconds:.1f} s, the reference log-probabilities of its "
                f"{NOUN[train.kind]}s take {step_rows * pass_seconds:.1f} s, and "
                f"{max(0.0, budget.left() - later):.0f} s are left",
                step_rows * (row_seconds + pass_seconds),
                later,
            )
        train_rows = min(train_rows, train.num_rows)
        if (train_rows, val_rows) == (train.num_rows, val.num_rows):
            return None
        return {"train": train_rows, "val": val_rows}

    def _pass_seconds(self, session: Session, rows: TextRows) -> float:
        """Measure the seconds of the forward passes per row, if all ranks share the rows."""
        unused = torch.zeros(int(rows.scored_start[-1]), dtype=torch.float32)
        return seconds_per_row(session, rows, lambda indices: self._score(session, rows, indices, unused))

    def _path(self, key: str) -> Path:
        return self.datasets["train"].directory / "reference" / f"{key}.safetensors"

    def _cache_key(self, session: Session) -> str:
        """Return a hash of weights, architecture, scale of the adapters, data, sequence length and activation dtype.

        The run records it, because a resumed run no longer has the initial weights.
        """
        digest = xxhash.xxh3_128(self.datasets["train"].fingerprint.encode())
        digest.update(f"{session.model.activation_dtype} {self.datasets['train'].sequence_length}".encode())
        adapter = session.config.adapter
        digest.update(f"{session.model.config.model_dump_json()} {adapter and adapter.scale}".encode())
        for name, tensor in sorted(session.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return str(session.world.broadcast_result(digest.hexdigest))


def seconds_per_row(session: Session, rows: TextRows, work: Callable[[list[int]], object]) -> float:
    """Measure the seconds of `work` per row, if all ranks share the rows. work: takes the indices of some rows."""
    indices = next(iter(rows_of_rank(rows, session, None)))
    seconds = 0.0
    for _ in range(2):  # the first pass compiles on a GPU
        began = time.perf_counter()
        work(indices)
        seconds = time.perf_counter() - began
        if session.world.device.type == "cpu":
            break
    return session.world.broadcast([seconds / (len(indices) * session.world.size)])[0]


def _save(path: Path, logprobs: Mapping[str, NDArray[np.float32]]) -> None:
    """Save the reference log-probabilities by split. Raises RunError if the file cannot be written."""
    with replace_atomically(path) as temporary:
        path.parent.mkdir(exist_ok=True)
        save_file(dict(logprobs), temporary)
