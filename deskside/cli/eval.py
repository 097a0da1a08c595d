"""`deskside eval`: bits per byte of a model, and tasks.

It stands here, above everything that it uses, because it begins by turning a path into a model (export/load.py). With
--json standard output holds one JSON object and nothing else; all other words go to standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from tokenizers import Tokenizer

from deskside.cli.parser import parse
from deskside.data.chat.renderer import Renderer, own_template
from deskside.data.corpus.progress_bar import Progress
from deskside.engine.device import Device, device_of, dtype_of, say
from deskside.evaluate.likelihood import Encoder
from deskside.evaluate.run import (
    CORE_TASKS,
    Core,
    Prepared,
    Subject,
    TaskResult,
    answers_of,
    check_chat,
    core,
    evaluate,
    prepare,
)
from deskside.evaluate.tasks import Selection, select
from deskside.evaluate.text_bpb import Measured, has_data, measure, run_config
from deskside.utils import strict_json
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import Loaded, load_model

BATCH_TOKENS = {"cpu": 8192, "cuda": 65536}


@dataclass
class Eval:
    """Bits per byte of a model, on its run's validation data or on a text; and tasks.

    Example: deskside eval runs/demo --json

    Example: deskside eval runs/demo --text book.txt

    Example: deskside eval runs/124m --tasks core --tasks-dir DIR --limit 500

    Example: deskside eval my-model --tasks gsm8k,humaneval --tasks-dir hf: --chat
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="a run, or a Hugging Face directory"),
    ]
    text: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Evaluate this text instead: .txt, .jsonl[.gz|.zst] or .parquet with a text field."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Evaluate the validation split of this prepared data instead of the run's own."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="NAME,...")] = None
    """Tasks by name; core: those of the CORE metric; all: every one whose data is there."""
    tasks_dir: Annotated[str | None, tyro.conf.arg(metavar="DIR|hf:")] = None
    """Where the tasks' files are; hf: reads them from the Hugging Face hub."""
    limit: int | None = None
    """Items of each task at most."""
    shots: int | None = None
    """Solved examples before each question. Default: each task's own."""
    chat: bool = False
    """Ask in the model's chat template."""
    start: bool = False
    """Begin every text with the start token, as training does. lm-eval does so with add_bos_token=True only."""
    items: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write what the model made of each item: JSON lines, in a new file."""
    device: Device = "auto"
    """auto: cuda where there is one."""
    sequence_length: int | None = None
    """Tokens that the model sees at most, for bits per byte. Default: the run's."""
    batch_tokens: int | None = None
    """Tokens per forward pass."""
    json: bool = False
    """Print one JSON object on standard output."""


def run(argv: Sequence[str]) -> int:
    """`deskside eval`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Eval, argv, "deskside eval")
    selection = _checked(options)
    device = device_of(options.device)
    tasks = [] if selection is None else _prepared(options, selection)
    loaded = load_model(options.model, device, dtype_of(device), say)
    config = run_config(loaded)
    subject = _subject(options, loaded, device)
    measured = None
    if options.tasks is None or options.text or options.data or has_data(config):
        measured = measure(
            loaded,
            config,
            device,
            text=options.text,
            data=options.data,
            sequence_length=options.sequence_length,
            batch_tokens=options.batch_tokens or BATCH_TOKENS[device.type],
        )
    done = _evaluate_tasks(options, tasks, subject)
    # Of CORE's tasks all that have data, or the number would be another one.
    incomplete = any(each.chosen.core and each.chosen.name in done.failed for each in tasks)
    whole = None if incomplete else core(done.results)
    if options.json:
        found = _as_json(options, loaded, measured)
        if selection is not None:
            found |= _tasks_as_json(options, selection, done, whole)
        print(strict_json.dumps(found))
    else:
        if measured is not None:
            _print_measured(measured)
        if done.results:
            _print_tasks(done.results, whole)
    return 1 if done.failed else 0


def _checked(options: Eval) -> Selection | None:
    """The tasks that are asked for. Raises UsageError for options that cannot be, before any work."""
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
            f"--tasks {options.tasks!r}: names no task; give core, all, or names with commas between"
        )
    selection = select(names, options.tasks_dir, options.shots)
    check_chat(selection.chosen, options.chat)
    return selection


# Tasks


def _subject(options: Eval, loaded: Loaded, device: torch.device) -> Subject:
    chat = _renderer(loaded) if options.chat else None
    return Subject(
        loaded.model,
        loaded.tokenizer,
        Encoder(loaded.tokenizer, loaded.start_token, always_start=options.start, chat=chat),
        loaded.eos_tokens,
        options.batch_tokens or BATCH_TOKENS[device.type],
        options.chat,
    )


@dataclass(frozen=True)
class _Done:
    """Results of tasks, and why others gave none."""

    results: list[TaskResult]
    failed: dict[str, str]


def _evaluate_tasks(options: Eval, tasks: Sequence[Prepared], subject: Subject) -> _Done:
    """One that fails does not take the results of the others with it, unless it is the only one."""
    results, failed = [], {}
    for prepared in tasks:
        name = prepared.chosen.name
        try:
            with Progress(name, answers_of(prepared, options.limit), "answers") as bar:
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
    return _Done(results, failed)


def _prepared(options: Eval, selection: Selection) -> list[Prepared]:
    """The data of all tasks, read before any work, and what is wrong with it told."""
    if selection.left_out:
        say(f"no data in {options.tasks_dir} for: {', '.join(selection.left_out)}")
    tasks = [prepare(chosen, options.chat) for chosen in selection.chosen]
    for each in tasks:
        if each.bad.total:
            first = next(f"{reason}, {places[0]}" for reason, places in each.bad.examples.items())
            what = "record is" if each.bad.total == 1 else "records are"
            say(f"{each.chosen.name}: {each.bad.total} damaged {what} left out ({first})")
    if options.items is not None:
        file = Path(options.items)
        if file.exists():
            raise UsageError(f"--items {file}: is there already; name a new file")
        if not file.absolute().parent.is_dir():
            raise UsageError(f"--items {file}: its folder is not there; make it, or name another one")
    return tasks


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(strict_json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise RunError(f"--items {path}: cannot be written: {error.strerror or error}") from None


def _renderer(loaded: Loaded) -> Renderer:
    """Return the chat template of a model. Raises UsageError where it has none."""
    if own_template(loaded.tokenizer_dir) is None:
        raise UsageError(
            f"--chat: {loaded.tokenizer_dir} has no chat template; leave --chat out, or make a chat model: deskside sft"
        )
    return Renderer(loaded.tokenizer_dir, Tokenizer.from_str(loaded.tokenizer.to_str()))


# What is printed


def _as_json(options: Eval, loaded: Loaded, measured: Measured | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "bpb": measured and measured.result.bpb,
        "tasks": {},
        "model": options.model,
        "step": loaded.step,
    }
    if measured is not None:
        found |= {
            "loss": measured.result.loss,
            "tokens": measured.result.tokens,
            "bytes": measured.result.bytes,
            "source": measured.source,
            "sequence_length": measured.length,
            **measured.baselines,
        }
    return found


def _tasks_as_json(options: Eval, selection: Selection, done: _Done, whole: Core | None) -> dict[str, Any]:
    return {
        "tasks": {result.chosen.name: result.as_dict() for result in done.results},
        "core": whole and whole.value,
        "core_interval": whole and [whole.low, whole.high],
        "core_tasks": list(whole.tasks) if whole else [],
        "left_out": list(selection.left_out),
        "failed": done.failed,
        "limit": options.limit,
        "chat": options.chat,
        "start": options.start,
    }


def _print_measured(measured: Measured) -> None:
    result = measured.result
    print(f"{result.bpb:.4f} bits per byte (measured) on {result.bytes:,} bytes of {measured.source}")
    print(f"{result.loss:.4f} nats per token on {result.tokens:,} tokens, {measured.length} at a time")
    for name, value in measured.baselines.items():
        if value is not None:
            print(f"{value:.4f} bits per byte of {name.removesuffix('_bpb')} on the same text")


def _print_tasks(results: Sequence[TaskResult], whole: Core | None) -> None:
    """One line for each task, at most 80 columns."""
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
    print("measured here; centred: 0 is guessing, 1 is all right")
