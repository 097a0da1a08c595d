"""`deskside dpo`: preference pairs are prepared, a model learns to prefer the better answer, its report is written."""

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from deskside import cli_align
from deskside.config import merge, overrides
from deskside.config.align_dpo import DpoConfig
from deskside.config.run import RunConfig
from deskside.errors import UsageError

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
        refuse_beside_resume("dpo", options, given)
        return cli_align.finish(cli_align.resume(options.resume), options.json, _gained)
    require(options, "dpo", "pairs.jsonl")
    cli_align.length_into(given, options.epochs, options.hours, "1 epochs")
    align = objective("dpo", options, given)
    loaded = cli_align.load(str(options.source))
    with tempfile.TemporaryDirectory() as folder:
        chat = cli_align.chat_tokenizer(loaded, align.template, Path(folder))
        path = _prepared(align, given, Path(folder))
    config = _configure(loaded, given, align, path, chat.vocab_size)
    name = f"{Path(str(options.source)).resolve().name}-dpo"
    outcome = cli_align.start(
        config, loaded, str(options.source), chat.fresh, Path(options.runs), options.name, name,
        shlex.join(["deskside", "dpo", *argv]),
    )  # fmt: skip
    return cli_align.finish(outcome, options.json, _gained)


# Shared with grpo


def refuse_beside_resume(name: str, options: Any, given: dict[str, Any]) -> None:
    """Raises UsageError for what --resume would ignore, and for a run of another objective."""
    extra = [f for f in ("source", "name", "hours", "epochs") if getattr(options, f, None) is not None]
    if given or extra or options.sources or options.val:
        raise UsageError("--resume takes the configuration of the run; give no other options with it")
    from deskside.train.rundir import RunDirectory

    found = RunDirectory.open(Path(options.resume)).config().align
    made_by = found.name if found is not None else "train"
    if made_by != name:
        raise UsageError(
            f"{options.resume}: was made by deskside {made_by}; go on with: deskside {made_by} --resume "
            f"{options.resume}"
        )


def require(options: Any, command: str, file: str) -> None:
    """Raises UsageError without a model or data."""
    if options.source is None:
        raise UsageError(f"RUN|HF_DIR is missing: which model? deskside {command} runs/NAME --data {file}")
    if not options.sources:
        raise UsageError(f"--data is missing: learn from what? deskside {command} RUN --data {file}")


def objective(name: str, options: Any, given: dict[str, Any]) -> Any:
    """The options of the objective itself, checked before anything is loaded."""
    own: dict[str, Any] = {"name": name, "data": list(options.sources), "val": list(options.val)}
    return merge.build([{"align": {**own, **given.get("align", {})}}, cli_align.ALIGNED]).align


def prepared(asked: str | None, default: Path, make: Callable[[Path], object]) -> Path:
    """A prepared folder: found as an earlier run made it, or made now by the first process."""
    path = Path(asked) if asked is not None else default
    index = path / "index.json"
    deadline = time.monotonic() + cli_align.WAIT_SECONDS
    while not index.is_file() and int(os.environ.get("RANK", "0")) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not index.is_file():
        make(path)
    return path


def configure(
    loaded: Any,
    given: dict[str, Any],
    align: Any,
    path: Path,
    vocabulary: int,
    batch: dict[str, Any],
    rate: float,
    more: dict[str, Any] | None = None,
) -> RunConfig:
    """A run's configuration: defaults, `more` of them, and what was given. rate: of fine-tuning's learning rate."""
    model = loaded.config.model_dump(mode="json")
    if vocabulary > model["vocab_size"]:
        round_to = cli_align.ROUND_VOCABULARY
        model["vocab_size"] = -(-vocabulary // round_to) * round_to
    optimizer = cli_align.optimizer(model["hidden_size"], given)
    if "lr" in optimizer:
        optimizer["lr"] *= rate
    defaults = {
        **cli_align.ALIGNED,
        "align": align.model_dump(mode="json"),
        "optim": optimizer,
        "schedule": {"name": "cosine", "warmup": 0.05, "final_lr_fraction": 0.1},
        "batch": batch,
        "checkpoint": {"every": "10m"},
        **(more or {}),
    }
    if given.get("schedule", {}).get("name", "cosine") != "cosine":
        defaults["schedule"] = {"warmup": 0.05}
    rest = {name: part for name, part in given.items() if name != "align"}
    rest["data"] = {**rest.get("data", {}), "path": str(path)}
    return merge.build([defaults, *merge.resolved("model", model), rest])


# The parts of `dpo`


def _prepared(align: DpoConfig, given: dict[str, Any], tokenizer: Path) -> Path:
    from deskside.align.preference_data import prepare_pairs
    from deskside.align.prepared import Spec

    spec = Spec("preference", align.data, align.val, align.val_fraction, most_held_out=500)
    default = Path("data") / f"{cli_align.stem(align.data[0])}-pairs-{spec.key(tokenizer)}"
    return prepared(
        given.get("data", {}).get("path"), default, lambda out: prepare_pairs(spec, tokenizer, out)
    )


def _configure(
    loaded: Any, given: dict[str, Any], align: DpoConfig, path: Path, vocabulary: int
) -> RunConfig:
    from deskside.align.prepared import open_index

    length = int(
        given.get("batch", {}).get(
            "sequence_length", min(SEQUENCE_LENGTH, loaded.config.max_position_embeddings)
        )
    )
    tokens = open_index(path, "preference", max(vocabulary, loaded.config.vocab_size))["splits"]["train"][
        "tokens"
    ]
    rows = max(1, min(STEP_TOKENS, tokens // STEPS_PER_EPOCH) // length)
    batch = {"sequence_length": length, "tokens": int(2 ** (rows.bit_length() - 1)) * length}
    return configure(loaded, given, align, path, vocabulary, batch, RATE)


def _gained(summary: dict[str, Any]) -> str:
    before = summary["before"]["val_accuracy"]
    return (
        f"{before:.1%} -> {summary['val_accuracy']:.1%} of {summary['val_pairs']:,} pairs the right way round, margin "
        f"{summary['val_margin']:.3f}, KL {summary['val_kl']:.4f} per token"
    )
