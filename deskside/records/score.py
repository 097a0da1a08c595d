"""The score of a finished run: its exported model, on a record's corpus, computed only by transformers."""

from dataclasses import dataclass
from pathlib import Path

import torch

from deskside.data.reading.rows import PackedDataset
from deskside.evaluate.stream_bpb import VAL, TokenStream, read_stream, stream_bpb, transformers_loss
from deskside.facts.gpus import find_device
from deskside.facts.records import Corpus
from deskside.run.continuing import resume_command
from deskside.run.directory import RunDirectory
from deskside.run.record import DAMAGED, RunRecord, mapping, number, text
from deskside.utils.errors import RunError, UsageError

BATCH_TOKENS = 8192  # tokens of a forward pass; with a vocabulary of 32,768, their logits take 1 GiB
OVERRUN = 1.01  # a run may exceed its limit by the step in which it ends


@dataclass(frozen=True)
class ScoredRun:
    """A finished run with its score.

    seconds: of training, by the run's training clock. card: as in the table of GPUs, else as the driver reports it.
    """

    seed: int
    bits_per_byte: float
    seconds: float
    tokens: int
    card: str


def check_corpus(corpus: Corpus, data: str) -> None:
    """Raise UsageError unless prepared data is exactly that of the corpus."""
    found = PackedDataset(data, VAL, corpus.row_tokens).fingerprint
    if found != corpus.fingerprint:
        raise UsageError(
            f"{data}: is not the data of the corpus {corpus.name} (fingerprint {found}, not {corpus.fingerprint}); "
            f"make it with: {corpus.prepare}"
        )


def score_run(run: RunRecord, corpus: Corpus, data: str, minutes: float) -> ScoredRun:
    """Score the model of a finished run. Raises UsageError if the run breaks a rule of records with this time limit."""
    path = run.path
    if run.state == DAMAGED:
        raise RunError(f"{path / 'summary.json'}: is damaged; restore it, or train the run again")
    if not run.finished:
        command = resume_command(path)
        raise UsageError(f"{path}: has not finished{f'; continue it with: {command}' if command else ''}")
    schedule = mapping(run.config.get("schedule"))
    seconds, tokens, seed = (number(value) for value in (
        run.summary.get("seconds"), run.summary.get("tokens"), run.config.get("seed"),
    ))  # fmt: skip
    if schedule.get("clock") != "training" or seconds is None or tokens is None or seed is None:
        raise UsageError(
            f"{path}: its time was not counted as a record's; train with --schedule.clock training and a length in "
            f"minutes"
        )
    if seconds > minutes * 60 * OVERRUN:
        raise UsageError(
            f"{path}: trained for {seconds:.0f} s, more than the {minutes:g} minutes of the record"
        )
    if run.plan.get("data") != corpus.fingerprint:
        raise UsageError(
            f"{path}: was not trained on the data of the corpus {corpus.name}; make it with: {corpus.prepare}"
        )
    if run.run.get("init") is not None:
        raise UsageError(f"{path}: started from another model's weights; a record starts from random ones")
    bpb = model_bpb(RunDirectory(path).model, read_stream(data), corpus.row_tokens)
    return ScoredRun(int(seed), bpb, seconds, int(tokens), card_of(run))


def model_bpb(model: Path, stream: TokenStream, row_tokens: int) -> float:
    """Return the bits per byte of an exported model, by transformers, on the GPU if there is one.

    Raises UsageError if the folder has no model, or it takes fewer tokens than a row has.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loss = transformers_loss(model, row_tokens, device)
    return stream_bpb(loss, stream, row_tokens, max(1, BATCH_TOKENS // row_tokens), device).bpb


def card_of(run: RunRecord) -> str:
    """Return the card that a run was trained on: its name in the table of GPUs, or else the driver's or the CPU's."""
    gpu = mapping(run.environment.get("gpu"))
    name, memory = text(gpu.get("name")), number(gpu.get("memory_gib"))
    known = find_device(name, int(memory * 2**30)) if name and memory else None
    return known.name if known else name or text(run.environment.get("cpu")) or "unknown"
