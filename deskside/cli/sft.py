"""`deskside sft`: conversations are prepared, a model learns to answer, what came of it is printed.

What `dpo` and `grpo` need as well stands here too: the model to begin with, its chat tokenizer, starting and resuming.
"""

import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

import deskside
from deskside.cli import overrides
from deskside.config import merge
from deskside.config.align import SftConfig
from deskside.config.duration import Duration
from deskside.config.run import RunConfig
from deskside.data.corpus.progress_bar import limited
from deskside.train.prepare.time_budget import too_short
from deskside.utils import strict_json
from deskside.utils.errors import UsageError

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
PREPARE_SHARE = 0.5  # of a run's length, that starting and preparing its data may take
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
        return go_on(options, given)
    require(options, "sft", "chats.jsonl")
    length_into(given, options.epochs, options.hours)
    align = objective("sft", options, given)
    return learn(
        "sft",
        argv,
        options,
        given,
        align.template,
        lambda tokenizer: _prepared(given, align, tokenizer),
        lambda loaded, path, size: _configure(loaded, given, align, path, size),
        limit=wall_limit(given),
    )


# Shared with dpo and grpo

ALIGNED: dict[str, Any] = {"data": {"document_mask": True}}


def learn(
    name: str,
    argv: Sequence[str],
    options: Any,
    given: dict[str, Any],
    template: str | None,
    prepare: Callable[[Path], Path],
    configure: Callable[[Any, Path, int], RunConfig],
    gained: Callable[[dict[str, Any]], str] | None = None,
    limit: float | None = None,
) -> int:
    """Load the model, prepare the data for its tokenizer, train, print; returns the exit code.

    prepare: from the chat tokenizer's folder to that of the data. configure: of the loaded model, that folder and the
    tokenizer's size. limit: of the run, in seconds; preparing counts against it.
    """
    from deskside.run.directory import RunDirectory

    if not int(os.environ.get("RANK", "0")):  # another process may have made it already
        RunDirectory.check_name(Path(options.runs), options.name)
    source = str(options.source)
    loaded = load(source)
    merge.refuse_other_model(loaded.config, given, source)
    with tempfile.TemporaryDirectory() as folder:
        chat = chat_tokenizer(loaded, template, Path(folder))
        with _in_time(limit):
            path = prepare(Path(folder))
    config = configure(loaded, path, chat.vocab_size)
    if path.parent == Path("data") and not int(os.environ.get("RANK", "0")):  # not a place that was asked for
        print(f"data: prepared in {path}, where later runs find it", file=sys.stderr, flush=True)
    default = f"{Path(source).resolve().name}-{name}"
    command = shlex.join(["deskside", name, *argv])
    outcome = start(config, loaded, source, chat.fresh, Path(options.runs), options.name, default, command)
    return finish(outcome, options.json, gained)


def wall_limit(given: dict[str, Any]) -> float | None:
    """Return the run's length in wall-clock seconds, None for any other length."""
    schedule = given.get("schedule", {})
    lengths = {key: schedule[key] for key in ("length", *merge.LENGTH_ALIASES) if key in schedule}
    text = merge.merge([{"schedule": lengths}])[0]["schedule"].get("length")
    try:
        length = Duration.parse(text) if text is not None else None
    except ValueError:
        return None  # validation says so with the key's name
    timed = length is not None and length.unit == "seconds" and schedule.get("clock", "wall") == "wall"
    return length.value if timed and length is not None else None


@contextlib.contextmanager
def _in_time(limit: float | None) -> Iterator[None]:
    """Refuse data inside whose preparation would take more than `PREPARE_SHARE` of the run."""
    if limit is None:
        yield
        return
    seconds = max(0.0, PREPARE_SHARE * limit - (time.perf_counter() - deskside.STARTED))

    def error(left: float) -> UsageError:
        return too_short(limit, f"preparing the data takes {left:.0f} s more", (limit + left) / PREPARE_SHARE)

    with limited(seconds, error):
        yield


def refuse_beside_resume(options: Any, given: dict[str, Any]) -> None:
    """Raises UsageError for what --resume would ignore."""
    extra = [
        f for f in ("source", "name", "hours", "epochs", "questions") if getattr(options, f, None) is not None
    ]
    if given or extra or options.sources or options.val:
        raise UsageError("--resume takes the configuration of the run; give no other options with it")


def refuse_another(name: str, path: str) -> None:
    """Raises UsageError for a run of another objective."""
    from deskside.run.directory import RunDirectory

    found = RunDirectory.open(Path(path)).config().align
    made_by = found.name if found is not None else "train"
    if made_by != name:
        raise UsageError(
            f"{path}: was made by deskside {made_by}; go on with: deskside {made_by} --resume {path}"
        )


def go_on(
    options: Any,
    given: dict[str, Any],
    only: str | None = None,
    gained: Callable[[dict[str, Any]], str] | None = None,
) -> int:
    """What --resume does. only: the objective that the run must have; None takes any. gained: see `finish`."""
    refuse_beside_resume(options, given)
    if only is not None:
        refuse_another(only, options.resume)
    return finish(resume(options.resume), options.json, gained)


def require(options: Any, command: str, file: str) -> None:
    """Raises UsageError without a model or data."""
    if options.source is None:
        raise UsageError(f"RUN|HF_DIR is missing: which model? deskside {command} runs/NAME --data {file}")
    if str(options.source).endswith(".toml"):
        raise UsageError(
            f"{options.source}: deskside {command} takes no file but a model to begin with; write the file's keys as "
            f"options: deskside {command} runs/NAME --data {file} --optim.lr 1e-5"
        )
    if not options.sources:
        raise UsageError(f"--data is missing: learn from what? deskside {command} RUN --data {file}")


def objective(name: str, options: Any, given: dict[str, Any]) -> Any:
    """The options of the objective itself, checked before anything is loaded."""
    own: dict[str, Any] = {"name": name, "data": list(options.sources), "val": list(options.val)}
    return merge.build([{"align": {**own, **given.get("align", {})}}, ALIGNED]).align


def prepared(asked: str | None, default: Path, make: Callable[[Path], object]) -> Path:
    """A prepared folder: found as an earlier run made it, or made now by the first process."""
    path = Path(asked) if asked is not None else default
    index = path / "index.json"
    deadline = time.monotonic() + WAIT_SECONDS
    while not index.is_file() and int(os.environ.get("RANK", "0")) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not index.is_file():
        make(path)
    return path


def prepared_from(
    given: dict[str, Any], spec: Any, name: str, tokenizer: Path, make: Callable[[Path], object]
) -> Path:
    """`prepared` by what `align.prepared.Spec` names. Raises UsageError where --data.path holds something else."""
    from deskside.align.prepared import key_of

    key = spec.key(tokenizer)
    default = Path("data") / f"{stem(spec.sources[0])}-{name}-{key}"
    path = prepared(given.get("data", {}).get("path"), default, make)
    if key_of(path) not in (key, None):
        raise UsageError(
            f"--data.path {path}: holds other {name}, or is for another tokenizer; give another path, or none"
        )
    return path


def configure(
    loaded: Any,
    given: dict[str, Any],
    align: Any,
    path: Path,
    vocabulary: int,
    batch: dict[str, Any],
    rate: float,
    warmup: float,
    final_lr_fraction: float,
    more: dict[str, Any] | None = None,
) -> RunConfig:
    """A run's configuration: defaults, `more` of them, and what was given. rate: of fine-tuning's learning rate."""
    model = loaded.config.model_dump(mode="json")
    if vocabulary > model["vocab_size"]:
        model["vocab_size"] = -(-vocabulary // ROUND_VOCABULARY) * ROUND_VOCABULARY
    optim = optimizer(model["hidden_size"], given)
    if "lr" in optim:
        optim["lr"] *= rate
    defaults = {
        **ALIGNED,
        "align": align.model_dump(mode="json"),
        "optim": optim,
        "schedule": {"name": "cosine", "warmup": warmup, "final_lr_fraction": final_lr_fraction},
        "batch": batch,
        "checkpoint": {"every": "10m"},
        **(more or {}),
    }
    name = given.get("schedule", {}).get("name")
    if isinstance(name, str) and name != "cosine":
        defaults["schedule"] = {"warmup": warmup}
    rest = {name: part for name, part in given.items() if name != "align"}
    rest["data"] = {**rest.get("data", {}), "path": str(path)}
    return merge.build([defaults, *merge.resolved("model", model), rest])


def batch_of(
    loaded: Any, given: dict[str, Any], longest: int, tokens: int, most: int, steps: int
) -> dict[str, int]:
    """The batch: rows of at most `longest` tokens; `most` tokens per step, and of little data so few that an epoch has
    some `steps` of them. tokens: of the data."""
    length = int(
        given.get("batch", {}).get("sequence_length", min(longest, loaded.config.max_position_embeddings))
    )
    rows = max(1, min(most, tokens // steps) // length)
    return {"sequence_length": length, "tokens": int(2 ** (rows.bit_length() - 1)) * length}


def load(source: str) -> Any:
    """The model to begin with (`export.load.Loaded`). Raises UsageError."""
    from deskside.weights.load import load_model

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
    """Begin a run (`training_run.RunOutcome`) from a loaded model. fresh: tokens that no training has seen."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA when torch starts it
    from deskside.align.registry import objective_of
    from deskside.train import training_run
    from deskside.train.loop.callback import ReportFollows
    from deskside.train.state.init_weights import InitialWeights

    initial = InitialWeights.of_chat(loaded, source, config, fresh)
    return training_run.start(
        config,
        root,
        name,
        default_name,
        command,
        initial,
        objective=objective_of(config),
        watch=ReportFollows(),
    )


def resume(path: str) -> Any:
    """Go on with a run of any objective (`training_run.RunOutcome`)."""
    from deskside.run.directory import RunDirectory

    config = RunDirectory.open(Path(path)).config()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from deskside.align.registry import objective_of
    from deskside.train import training_run
    from deskside.train.loop.callback import ReportFollows

    return training_run.resume(Path(path), ReportFollows(), objective_of(config))


def finish(outcome: Any, as_json: bool, gained: Callable[[dict[str, Any]], str] | None = None) -> int:
    """Write the report and print what came of a run; returns the exit code.

    gained: the line that says what the objective reached, from the summary; by default that of `sft`.
    """
    if outcome.first and outcome.status == "finished":
        from deskside.report.write import write_report

        page = write_report(outcome.run.path)
        if as_json:
            print(strict_json.dumps(outcome.summary))
        else:
            _print_outcome(outcome.run.path, outcome.summary, page, gained or _gained)
    elif outcome.first and as_json:
        from deskside.cli.train import stopped

        print(strict_json.dumps(stopped(outcome.run, outcome.status)))
    return int(outcome.exit_code)


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


def chat_tokenizer(loaded: Any, template: str | None, folder: Path) -> Any:
    from deskside.data.chat import chat_template

    text = None
    if template is not None:
        try:
            text = Path(template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--align.template {template}: cannot be read ({error})") from None
    return chat_template.make(loaded.tokenizer_dir, folder, text)


def _prepared(given: dict[str, Any], align: SftConfig, tokenizer: Path) -> Path:
    """The folder with the prepared conversations: made now, or found as an earlier run made it."""
    from deskside.data.chat.prepare_chat import ChatSpec, cache_key, prepare_chat
    from deskside.data.reading.shards import read_index

    spec = ChatSpec(align.data, align.val, align.val_fraction, align.turns)
    key = cache_key(spec, tokenizer)
    default = Path("data") / f"{stem(align.data[0])}-chat-{key}"
    path = prepared(
        given.get("data", {}).get("path"), default, lambda out: prepare_chat(spec, tokenizer, out)
    )
    if (found := read_index(path)).chat is not None and found.arguments.get("key") != key:
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
    from deskside.data.reading.shards import read_index

    tokens = read_index(path).splits["train"].tokens
    batch = batch_of(loaded, given, SEQUENCE_LENGTH, tokens, STEP_TOKENS, STEPS_PER_EPOCH)
    # A cosine without a floor: a fine-tuned model is used as it ends, nothing is trained on from it.
    return configure(loaded, given, align, path, vocabulary, batch, 1.0, warmup=0.03, final_lr_fraction=0.0)


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
    from deskside.cli.train import prefix, speed

    size = f"{summary['steps']:,} steps, {summary['tokens']:,} tokens"
    print(f"trained     {size} in {summary['seconds']:.0f} s")
    print(f"speed       {speed(summary)}")
    for sample in summary["samples"]:
        print(f"\n{sample['prompt']}")
        for label, key in (("before", "before"), ("after", "text"), ("wanted", "reference")):
            if key in sample:
                print(f"  {label}: {' '.join(sample[key].split())[:200]}")
    print(f"\nreport: {page}")
    print("next:")
    for command in (f"deskside chat {path}", f"deskside export {path} --to hf --out my-model"):
        print(f"  {prefix()}{command}")
