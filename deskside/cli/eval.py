"""`deskside eval`: bits per byte of a model, and evaluation tasks.

With --json standard output holds one JSON object; everything else is printed on standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption, ModelOption
from deskside.data.chat.renderer import Renderer, read_chat_template
from deskside.data.corpus.progress_bar import ProgressBar
from deskside.engine.device import Device, device_of, dtype_of
from deskside.evaluate.likelihood import Encoder
from deskside.evaluate.run_task import (
    CORE_TASKS,
    Core,
    Prepared,
    Subject,
    TaskResult,
    answers_of,
    check_chat,
    core,
    evaluate,
)
from deskside.evaluate.tasks import TaskSelection, select
from deskside.evaluate.text_bpb import TextBpb, has_data, measure, run_config
from deskside.utils import strict_json
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import Loaded, load_model

BATCH_TOKENS = {"cpu": 8192, "cuda": 65536}


@dataclass(kw_only=True)
class EvalOptions(ModelOption, JsonOption):
    """Measure bits per byte of a model on its validation data or on a text, and run tasks.

    Examples:
      deskside eval runs/demo --json
      deskside eval runs/demo --text book.txt
      deskside eval runs/124m --tasks core --tasks-dir DIR --limit 500
      deskside eval my-model --tasks gsm8k,humaneval --tasks-dir hf: --chat
    """

    text: str | None = option(
        "evaluate this text: .txt, .jsonl[.gz|.zst] or .parquet with a text field", None, metavar="FILE"
    )
    data: str | None = option("evaluate the validation split of this prepared data", None, metavar="DIR")
    tasks: str | None = option(
        "tasks by name; core: those of the CORE metric; all: every task whose data is found",
        None,
        metavar="NAME,...",
    )
    tasks_dir: str | None = option(
        "where the tasks' files are; hf: reads them from the Hugging Face hub", None, metavar="DIR|hf:"
    )
    limit: int | None = option("maximum items per task", None)
    shots: int | None = option("few-shot examples before each question; default: each task's own", None)
    chat: bool = option("use the model's chat template", False)
    start: bool = option(
        "begin every text with the start token, as in training (lm-eval: add_bos_token=True)", False
    )
    items: str | None = option("write the result of each item to a new JSON Lines file", None, metavar="FILE")
    device: Device = option("auto uses cuda if it is available", "auto")
    sequence_length: int | None = option("context length for bits per byte; default: the run's", None)
    batch_tokens: int | None = option("tokens per forward pass", None)


COMMAND = Command("eval", EvalOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside eval` and return the exit code. Raises UsageError and RunError."""
    options = COMMAND.parse(argv)
    selection = _checked(options)
    device = device_of(options.device)
    tasks = [] if selection is None else _prepared(options, selection)
    loaded = load_model(options.model, device, dtype_of(device), say)
    config = run_config(loaded)
    batch_tokens = options.batch_tokens or BATCH_TOKENS[device.type]
    chat = _renderer(loaded) if options.chat else None
    encoder = Encoder(loaded.tokenizer, loaded.start_token, always_start=options.start, chat=chat)
    subject = Subject(loaded.model, loaded.tokenizer, encoder, loaded.eos_tokens, batch_tokens, options.chat)
    measured = None
    if options.tasks is None or options.text or options.data or has_data(config):
        measured = measure(
            loaded,
            config,
            device,
            text=options.text,
            data=options.data,
            sequence_length=options.sequence_length,
            batch_tokens=batch_tokens,
        )
    results, failed = _evaluate_tasks(options, tasks, subject)
    # CORE is a mean over tasks: without one that has data it would be a different metric.
    incomplete = any(each.chosen.core and each.chosen.name in failed for each in tasks)
    whole = None if incomplete else core(results)
    if options.json:
        found: dict[str, Any] = {"bpb": None, "tasks": {}, "model": options.model, "step": loaded.step}
        if measured is not None:
            found |= {
                "bpb": measured.result.bpb,
                "loss": measured.result.loss,
                "tokens": measured.result.tokens,
                "bytes": measured.result.bytes,
                "source": measured.source,
                "sequence_length": measured.length,
                **measured.baselines,
            }
        if selection is not None:
            found |= {
                "tasks": {result.chosen.name: result.as_dict() for result in results},
                "core": whole and whole.value,
                "core_interval": whole and [whole.low, whole.high],
                "core_tasks": list(whole.tasks) if whole else [],
                "left_out": list(selection.left_out),
                "failed": failed,
                "limit": options.limit,
                "chat": options.chat,
                "start": options.start,
            }
        print_json(found)
    else:
        if measured is not None:
            _print_measured(measured)
        if results:
            _print_tasks(results, whole)
    return 1 if failed else 0


def _checked(options: EvalOptions) -> TaskSelection | None:
    """Return the selected tasks, None without --tasks. Raises UsageError for invalid options, before any work."""
    if options.text is not None and options.data is not None:
        raise UsageError("--text and --data: give one of them")
    for name, value, least in (
        ("--batch-tokens", options.batch_tokens, 1),
        ("--limit", options.limit, 1),
        ("--shots", options.shots, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: must be at least {least}")
    if options.tasks is None:
        of_tasks = ("tasks_dir", "limit", "shots", "chat", "start", "items")
        unused = next((name for name in of_tasks if getattr(options, name) not in (None, False)), None)
        if unused is not None:
            raise UsageError(f"--{unused.replace('_', '-')}: has no effect without --tasks; add --tasks core")
        return None
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise UsageError(
            f"--tasks {options.tasks!r}: names no task; give core, all, or names separated by commas"
        )
    selection = select(names, options.tasks_dir, options.shots)
    check_chat(selection.chosen, options.chat)
    return selection


# Tasks


def _evaluate_tasks(
    options: EvalOptions, tasks: Sequence[Prepared], subject: Subject
) -> tuple[list[TaskResult], dict[str, str]]:
    """Return the results of all tasks, and the errors of those that failed. The error of an only task is raised."""
    results: list[TaskResult] = []
    failed: dict[str, str] = {}
    for prepared in tasks:
        name = prepared.chosen.name
        try:
            with ProgressBar(name, answers_of(prepared, options.limit), "answers") as bar:
                result = evaluate(subject, prepared, limit=options.limit, tick=bar.advance)
        except (UsageError, RunError) as error:
            if len(tasks) == 1:
                raise
            say(f"{name}: failed: {error}")
            failed[name] = str(error)
            continue
        results.append(result)
        if options.items is not None:
            _append(Path(options.items), result.records)
    return results, failed


def _prepared(options: EvalOptions, selection: TaskSelection) -> list[Prepared]:
    """Read the data of all tasks before any work, and report damaged records."""
    if selection.left_out:
        say(f"no data in {options.tasks_dir} for: {', '.join(selection.left_out)}")
    tasks = [Prepared(chosen, options.chat) for chosen in selection.chosen]
    for each in tasks:
        if each.bad.total:
            first = next(f"{reason}, {places[0]}" for reason, places in each.bad.examples.items())
            what = "record is" if each.bad.total == 1 else "records are"
            say(f"{each.chosen.name}: {each.bad.total} damaged {what} left out ({first})")
    if options.items is not None:
        file = Path(options.items)
        if file.exists():
            raise UsageError(f"--items {file}: exists already; name a new file")
        if not file.absolute().parent.is_dir():
            raise UsageError(f"--items {file}: its directory does not exist; create it, or name another file")
    return tasks


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(strict_json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise RunError(f"--items {path}: cannot be written: {error.strerror or error}") from None


def _renderer(loaded: Loaded) -> Renderer:
    """Return the chat template of a model. Raises UsageError where it has none."""
    if read_chat_template(loaded.tokenizer_dir) is None:
        raise UsageError(
            f"--chat: {loaded.tokenizer_dir} has no chat template; leave --chat out, or train a chat model with "
            f"deskside sft"
        )
    return Renderer(loaded.tokenizer_dir, Tokenizer.from_str(loaded.tokenizer.to_str()))


# Output


def _print_measured(measured: TextBpb) -> None:
    result = measured.result
    print(f"{result.bpb:.4f} bits per byte (measured) on {result.bytes:,} bytes of {measured.source}")
    print(f"{result.loss:.4f} nats per token on {result.tokens:,} tokens, {measured.length} at a time")
    for name, value in measured.baselines.items():
        if value is not None:
            print(f"{value:.4f} bits per byte of {name.removesuffix('_bpb')} on the same text")


def _print_tasks(results: Sequence[TaskResult], whole: Core | None) -> None:
    """Print one line of at most 80 columns for each task."""
    width = max(len(result.chosen.name) for result in results)
    print(f"{'task':<{width}}  right   95 % interval   items shots centred")
    for result in results:
        line = result.as_dict()
        print(
            f"{result.chosen.name:<{width}} {line['accuracy']:>6.1%} {line['low']:>6.1%} to {line['high']:>6.1%}"
            f" {result.n:>7,} {result.chosen.shots:>5} {line['centred']:>7.3f}"
        )
    if whole is not None:
        print(
            f"CORE-like: {whole.value:.4f} ({whole.low:.4f} to {whole.high:.4f}, 95 %), the mean of "
            f"{len(whole.tasks)} of the {CORE_TASKS} tasks"
        )
    print("measured; centred: 0 is guessing, 1 is all correct")
