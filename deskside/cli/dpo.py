"""`deskside dpo`: preference pairs are prepared, a model learns to prefer the better answer, its report is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from deskside.cli import overrides, sft
from deskside.config.align_dpo import DpoConfig
from deskside.config.run import RunConfig

DESCRIPTION = """Train a model on preference pairs: of two answers, the better one becomes more likely (DPO).

Examples:
  deskside dpo runs/chat --data pairs.jsonl
  deskside dpo runs/chat --data pairs.jsonl.gz --align.beta 0.05 --name polite
  deskside dpo models/Qwen3-0.6B --data pairs.parquet --adapter.rank 16
  deskside dpo --resume runs/polite

A pair is {"prompt": "..." or messages, "chosen": "...", "rejected": "..."}.
"""
SEQUENCE_LENGTH = 2048
STEP_TOKENS, STEPS_PER_EPOCH = 65536, 40
# A step from a model that answers already must not undo it: a tenth of what fine-tuning takes.
RATE = 0.1


@dataclass(kw_only=True)
class DpoOptions:
    """Options of the command itself."""

    source: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="the model to begin with, best one that was fine-tuned"),
    ] = None
    sources: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            name="data", metavar="SOURCE", help="pairs: .jsonl[.gz|.zst], .parquet, a folder, hf:owner/name"
        ),
    ] = ()
    val: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="SOURCE", help="held-out pairs; default: a share of the data")
    ] = ()
    name: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="folder under --runs; default: the model's and -dpo")
    ] = None
    epochs: Annotated[str | None, tyro.conf.arg(metavar="E", help="times through the data; default: 1")] = (
        None
    )
    hours: Annotated[str | None, tyro.conf.arg(metavar="H", help="length in time instead of epochs")] = None
    resume: Annotated[str | None, tyro.conf.arg(metavar="RUN", help="go on with a stopped run")] = None
    runs: Annotated[str, tyro.conf.arg(metavar="DIR", help="where run directories are made")] = "runs"
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="JSON on standard output")] = False


def run(argv: Sequence[str]) -> int:
    """The command; returns the exit code. Raises UsageError and RunError."""
    options, given = overrides.parse(DpoOptions, argv, "deskside dpo", DESCRIPTION, align=DpoConfig)
    if options.resume is not None:
        return sft.go_on(options, given, "dpo", _gained)
    sft.require(options, "dpo", "pairs.jsonl")
    sft.length_into(given, options.epochs, options.hours, "1 epochs")
    align = sft.objective("dpo", options, given)
    return sft.learn(
        "dpo",
        argv,
        options,
        given,
        align.template,
        lambda tokenizer: _prepared(align, given, tokenizer),
        lambda loaded, path, size: _configure(loaded, given, align, path, size),
        _gained,
        sft.wall_limit(given),
    )


# The parts of `dpo`


def _prepared(align: DpoConfig, given: dict[str, Any], tokenizer: Path) -> Path:
    from deskside.align.preference_data import prepare_pairs
    from deskside.align.prepared import Spec

    spec = Spec("preference", align.data, align.val, align.val_fraction, most_held_out=500)
    return sft.prepared_from(given, spec, "pairs", tokenizer, lambda out: prepare_pairs(spec, tokenizer, out))


def _configure(
    loaded: Any, given: dict[str, Any], align: DpoConfig, path: Path, vocabulary: int
) -> RunConfig:
    from deskside.align.prepared import open_index

    tokens = open_index(path, "preference", max(vocabulary, loaded.config.vocab_size))["splits"]["train"][
        "tokens"
    ]
    batch = sft.batch_of(loaded, given, SEQUENCE_LENGTH, tokens, STEP_TOKENS, STEPS_PER_EPOCH)
    return sft.configure(
        loaded, given, align, path, vocabulary, batch, RATE, warmup=0.05, final_lr_fraction=0.1
    )


def _gained(summary: dict[str, Any]) -> str:
    before = summary["before"]["val_accuracy"]
    return (
        f"{before:.1%} -> {summary['val_accuracy']:.1%} of {summary['val_pairs']:,} pairs the right way round, margin "
        f"{summary['val_margin']:.3f}, KL {summary['val_kl']:.4f} per token"
    )
