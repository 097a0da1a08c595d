"""`deskside sft`: conversations are prepared, a model learns to answer, what came of it is printed.

What `dpo` and `grpo` need as well stands here too: the model to begin with, its chat tokenizer, starting and resuming.
"""

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from deskside.config import merge, overrides, strict_json
from deskside.config.align import SftConfig
from deskside.config.run import RunConfig
from deskside.errors import UsageError

DESCRIPTION = """Fine-tune a model on conversations: it learns what the assistant says in them.

Examples:
  deskside sft runs/124m --data chats.jsonl
  deskside sft runs/124m --data chats.jsonl.gz --epochs 2 --name chat
  deskside sft models/Qwen3-0.6B --data hf:HuggingFaceH4/no_robots --hours 1
  deskside sft --resume runs/chat

A conversation is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
"""
EPOCHS = 3
SEQUENCE_LENGTH = 2048
STEP_TOKENS, STEPS_PER_EPOCH = 32768, 50
ROUND_VOCABULARY = 64  # tensor cores like a multiple of it
WAIT_SECONDS = 24 * 3600  # of the other processes, for the first one to prepare the data


@dataclass(kw_only=True)
class SftOptions:
    """Options of the command itself."""

    source: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(
            metavar="RUN|HF_DIR", help="the model to begin with: a run, or a Hugging Face directory"
        ),
    ] = None
    sources: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            name="data",  # beside the group of options --data.path and so on, which is a field `data`
            metavar="SOURCE",
            help="conversations: .jsonl[.gz|.zst], .parquet, a folder, hf:owner/name",
        ),
    ] = ()
    val: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="SOURCE", help="held-out conversations; default: a share of the data"),
    ] = ()
    name: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="folder under --runs; default: the model's and -sft")
    ] = None
    epochs: Annotated[
        str | None, tyro.conf.arg(metavar="E", help=f"times through the data; default: {EPOCHS}")
    ] = None
    hours: Annotated[str | None, tyro.conf.arg(metavar="H", help="length in time instead of epochs")] = None
    resume: Annotated[str | None, tyro.conf.arg(metavar="RUN", help="go on with a stopped run")] = None
    runs: Annotated[str, tyro.conf.arg(metavar="DIR", help="where run directories are made")] = "runs"
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="JSON on standard output")] = False


def run(argv: Sequence[str]) -> int:
    """The command; returns the exit code. Raises UsageError and RunError."""
    options, given = overrides.parse(SftOptions, argv, "deskside sft", DESCRIPTION, align=SftConfig)
    if options.resume is not None:
        extra = [f for f in ("source", "name", "hours", "epochs") if getattr(options, f) is not None]
        if given or extra or options.sources or options.val:
            raise UsageError("--resume takes the configuration of the run; give no other options with it")
        return finish(resume(options.resume), options.json)
    if options.source is None:
        raise UsageError(
            "RUN|HF_DIR is missing: which model shall learn? deskside sft runs/NAME --data chats.jsonl"
        )
    if not options.sources:
        raise UsageError("--data is missing: which conversations? deskside sft RUN --data chats.jsonl")
    length_into(given, options.epochs, options.hours)
    align = _objective(given, options)
    loaded = load(options.source)
    with tempfile.TemporaryDirectory() as folder:
        chat = chat_tokenizer(loaded, align.template, Path(folder))
        path = _prepared(options, given, align, Path(folder))
    config = _configure(loaded, given, align, path, chat.vocab_size)
    command = shlex.join(["deskside", "sft", *argv])
    name = f"{Path(options.source).resolve().name}-sft"
    return finish(
        start(config, loaded, options.source, chat.fresh, Path(options.runs), options.name, name, command),
        options.json,
    )


# Shared with dpo and grpo

ALIGNED: dict[str, Any] = {"data": {"document_mask": True}}


def load(source: str) -> Any:
    """The model to begin with (`export.load.Loaded`). Raises UsageError."""
    from deskside.export.load import load_model

    return load_model(source)


def start(
    config: RunConfig,
    loaded: Any,
    source: str,
    fresh: Sequence[int],
    root: Path,
    name: str | None,
    default_name: str,
    command: str,
) -> Any:
    """Begin a run (`pretrain.Outcome`) from a loaded model. fresh: tokens that no training has seen."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA when torch starts it
    from deskside.align.registry import objective_of
    from deskside.data.tokenizer import load as load_tokenizer
    from deskside.train import pretrain
    from deskside.train.initial import Initial, grown

    assert config.data.path is not None
    weights = {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
    tokens = load_tokenizer(config.data.path).get_vocab(with_added_tokens=True)
    initial = Initial(source, grown(weights, config.model.vocab_size, fresh), tokens, tuple(fresh))
    return pretrain.start(config, root, name, default_name, command, initial, objective=objective_of(config))


def resume(path: str) -> Any:
    """Go on with a run of any objective (`pretrain.Outcome`)."""
    from deskside.train.rundir import RunDirectory

    config = RunDirectory.open(Path(path)).config()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from deskside.align.registry import objective_of
    from deskside.train import pretrain

    return pretrain.resume(Path(path), objective=objective_of(config))


def finish(outcome: Any, as_json: bool, gained: Callable[[dict[str, Any]], str] | None = None) -> int:
    """Write the report and print what came of a run; returns the exit code.

    gained: the line that says what the objective reached, from the summary; by default that of `sft`.
    """
    if outcome.first and outcome.status == "finished":
        from deskside.report.commands import write_report

        page = write_report(outcome.run.path)
        if as_json:
            print(strict_json.dumps(outcome.summary))
        else:
            _print_outcome(outcome.run.path, outcome.summary, page, gained or _gained)
    elif outcome.first and as_json:
        from deskside.cli_train import stopped

        print(strict_json.dumps(stopped(outcome.run, outcome.status)))
    return 0


# The parts of `sft`


def length_into(
    given: dict[str, Any], epochs: str | None, hours: str | None, default: str = f"{EPOCHS} epochs"
) -> None:
    """--epochs and --hours are the schedule's length, of which there is one; `default` when nothing was given."""
    schedule = given.setdefault("schedule", {})
    written = [name for name in ("length", *merge.LENGTH_ALIASES) if name in schedule]
    asked = [f"--schedule.{name}" for name in written]
    asked += [f"--{n}" for n, value in (("epochs", epochs), ("hours", hours)) if value is not None]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: the run can have one length only; give one of them")
    if hours is not None:
        schedule["hours"] = hours
    elif not written:
        schedule["length"] = f"{epochs} epochs" if epochs is not None else default


def _objective(given: dict[str, Any], options: SftOptions) -> SftConfig:
    """The options of the objective itself, checked before anything is loaded."""
    own: dict[str, Any] = {"name": "sft", "data": list(options.sources), "val": list(options.val)}
    align = merge.build([{"align": {**own, **given.get("align", {})}}, ALIGNED]).align
    assert isinstance(align, SftConfig)
    return align


def chat_tokenizer(loaded: Any, template: str | None, folder: Path) -> Any:
    from deskside.data import chat_template

    text = None
    if template is not None:
        try:
            text = Path(template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--align.template {template}: cannot be read ({error})") from None
    return chat_template.make(loaded.tokenizer_dir, folder, text)


def _prepared(options: SftOptions, given: dict[str, Any], align: SftConfig, tokenizer: Path) -> Path:
    """The folder with the prepared conversations: made now, or found as an earlier run made it."""
    from deskside.data.chat import ChatSpec, cache_key, prepare_chat
    from deskside.data.shards import INDEX, read_index

    spec = ChatSpec(align.data, align.val, align.val_fraction, align.turns)
    key = cache_key(spec, tokenizer)
    asked = given.get("data", {}).get("path")
    path = Path(asked) if asked is not None else Path("data") / f"{stem(align.data[0])}-chat-{key}"
    deadline = time.monotonic() + WAIT_SECONDS
    while not (path / INDEX).is_file() and int(os.environ.get("RANK", "0")) and time.monotonic() < deadline:
        time.sleep(0.5)  # the first process prepares
    if not (path / INDEX).is_file():
        prepare_chat(spec, tokenizer, path)
    elif (found := read_index(path)).chat is not None and found.arguments.get("key") != key:
        raise UsageError(
            f"--data.path {path}: holds other conversations, or is for another tokenizer; give another path, or none"
        )
    return path


def stem(spec: str) -> str:
    name = Path(spec.removeprefix("hf:").rstrip("/")).name.split(":")[0]
    return name.split(".")[0] or "data"


def _configure(
    loaded: Any, given: dict[str, Any], align: SftConfig, path: Path, vocabulary: int
) -> RunConfig:
    """Defaults for fine-tuning below what was given."""
    from deskside.data.shards import read_index

    model = loaded.config.model_dump(mode="json")
    if vocabulary > model["vocab_size"]:
        model["vocab_size"] = -(-vocabulary // ROUND_VOCABULARY) * ROUND_VOCABULARY
    batch = given.get("batch", {})
    length = int(batch.get("sequence_length", min(SEQUENCE_LENGTH, model["max_position_embeddings"])))
    defaults = {
        **ALIGNED,
        "align": align.model_dump(mode="json"),
        "optim": optimizer(model["hidden_size"], given),
        # A cosine without a floor: a fine-tuned model is used as it ends, nothing is trained on from it.
        "schedule": {"name": "cosine", "warmup": 0.03, "final_lr_fraction": 0.0},
        "batch": {
            "sequence_length": length,
            "tokens": _step_tokens(read_index(path).splits["train"].tokens, length),
        },
        "checkpoint": {"every": "10m"},
    }
    if isinstance(given.get("schedule", {}).get("name"), str) and given["schedule"]["name"] != "cosine":
        defaults["schedule"] = {"warmup": 0.03}
    rest = {name: part for name, part in given.items() if name != "align"}
    rest["data"] = {**rest.get("data", {}), "path": str(path)}
    return merge.build([defaults, *merge.resolved("model", model), rest])


def _step_tokens(tokens: int, length: int) -> int:
    """Tokens per step: 32,768, and of little data so few that an epoch has some 50 steps."""
    rows = max(1, min(STEP_TOKENS, tokens // STEPS_PER_EPOCH) // length)
    return int(2 ** (rows.bit_length() - 1)) * length


def optimizer(hidden_size: int, given: dict[str, Any]) -> dict[str, Any]:
    """AdamW without decay, as given: the rules of scaling are for training from nothing.

    The rate is 1e-4 at a width of 768 and falls with the width, as Adam's best rate does (Yang et al. 2022, arXiv
    2203.03466); that gives the 2e-5 that is usual at 4096. Adapters take ten times as much (Schulman et al. 2025,
    "LoRA Without Regret").
    """
    if given.get("optim", {}).get("name") == "muon":
        return {"name": "muon"}
    rate = 1e-4 * 768 / hidden_size
    adapted = "adapter" in given
    optimizer = {
        "name": "adamw",
        "lr": 10 * rate if adapted else rate,
        "betas": [0.9, 0.95],
        "weight_decay": 0.0,
    }
    return optimizer if adapted else {**optimizer, "scale": False}


def _gained(summary: dict[str, Any]) -> str:
    before = summary["before"]["val_loss"]
    return f"{before:.3f} -> {summary['val_loss']:.3f} nats per token that the assistant says"


def _print_outcome(
    path: Path, summary: dict[str, Any], page: Path, gained: Callable[[dict[str, Any]], str]
) -> None:
    print(f"held out    {gained(summary)}")
    speed = (
        f"{summary['tokens_per_second']:,.0f} tokens/s" if summary["tokens_per_second"] else "speed not known"
    )
    how = summary["precision"] + (", emulated" if summary["emulated"] else "")
    size = f"{summary['steps']:,} steps, {summary['tokens']:,} tokens"
    print(f"trained     {size} in {summary['seconds']:.0f} s, {speed} in {how}")
    for sample in summary["samples"]:
        print(f"\n{sample['prompt']}")
        for label, key in (("before", "before"), ("after", "text"), ("wanted", "reference")):
            if key in sample:
                print(f"  {label}: {' '.join(sample[key].split())[:200]}")
    print(f"\nreport: {page}")
    print("next:")
    from deskside.cli_train import prefix

    for command in (f"deskside chat {path}", f"deskside export {path} --to hf --out my-model"):
        print(f"  {prefix()}{command}")
