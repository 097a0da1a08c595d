"""`deskside eval`: bits per byte of a model, and tasks.

It stands here, above everything that it uses, because it begins by turning a path into a model (export/load.py). With
--json standard output holds one JSON object and nothing else; all other words go to standard error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from pydantic import ValidationError

from deskside.config import strict_json
from deskside.config.base import first_problem
from deskside.config.commandline import parse
from deskside.config.run import RunConfig
from deskside.data.chat_template import own_template
from deskside.data.progress import Progress
from deskside.data.rows import PackedDataset
from deskside.data.shards import checksum_file
from deskside.data.sources import BadInputLog, Source, iter_documents
from deskside.errors import RunError, UsageError
from deskside.evaluate.bpb import BitsPerByte, evaluate_dataset, evaluate_text
from deskside.evaluate.likelihood import Encoder
from deskside.evaluate.run import (
    CORE_TASKS,
    Core,
    Subject,
    TaskResult,
    answers_of,
    check_chat,
    core,
    evaluate,
    load,
)
from deskside.evaluate.tasks import Selection, select
from deskside.export.load import Loaded, load_model
from deskside.kernels.attention import Requirements, choose
from deskside.serve.machine import Device, device_of, dtype_of, say

HF_SEQUENCE_LENGTH = 2048  # of a model that comes without a run: the presets' own, so that numbers compare
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


@dataclass(frozen=True)
class _Measured:
    """Bits per byte of a source."""

    result: BitsPerByte
    baselines: dict[str, float | None]
    source: str
    length: int


def run_eval(argv: Sequence[str]) -> int:
    """`deskside eval`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Eval, argv, "deskside eval")
    selection = _checked(options)
    device = device_of(options.device)
    loaded = load_model(options.model, device, dtype_of(device), say)
    config = _run_config(loaded)
    subject = None if selection is None else _subject(options, loaded, device)
    measured = None
    if options.tasks is None or options.text or options.data or _has_data(config):
        measured = _measure(options, loaded, config, device)
    results: list[TaskResult] = []
    if selection is not None and subject is not None:
        results = _evaluate_tasks(options, selection, subject)
    whole = core(results)
    if options.json:
        print(strict_json.dumps(_as_json(options, loaded, measured, selection, results, whole)))
        return 0
    if measured is not None:
        _print_measured(measured)
    if results:
        _print_tasks(results, whole)
    return 0


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
    if options.items is not None and Path(options.items).exists():
        raise UsageError(f"--items {options.items}: is there already; name a new file")
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise UsageError(
            f"--tasks {options.tasks!r}: names no task; give core, all, or names with commas between"
        )
    selection = select(names, options.tasks_dir, options.shots)
    check_chat(selection.chosen, options.chat)
    return selection


# Bits per byte


def _measure(options: Eval, loaded: Loaded, config: RunConfig | None, device: torch.device) -> _Measured:
    length = options.sequence_length
    if length is None:
        longest = min(loaded.config.max_position_embeddings, HF_SEQUENCE_LENGTH)
        length = config.batch.sequence_length if config else longest
    if not 2 <= length <= loaded.config.max_position_embeddings:
        raise UsageError(
            f"--sequence-length {length}: this model takes 2 to {loaded.config.max_position_embeddings} tokens"
        )
    batch_tokens = options.batch_tokens or BATCH_TOKENS[device.type]
    if options.text is not None:
        attention = _attention(loaded, length, batch_tokens, False, device)
        result = evaluate_text(
            loaded.model,
            loaded.tokenizer,
            loaded.start_token,
            _texts(options.text),
            sequence_length=length,
            batch_tokens=batch_tokens,
            device=device,
            attention=attention,
        )
        return _Measured(result, {}, options.text, length)
    masked = config.data.document_mask if config else False
    dataset = _dataset(loaded, config, options.data, length)
    attention = _attention(loaded, length, batch_tokens, masked, device)
    with Progress("evaluate", dataset.num_tokens, "tokens") as bar:
        result = evaluate_dataset(
            loaded.model,
            dataset,
            micro_rows=max(1, min(batch_tokens // length, dataset.num_rows)),
            device=device,
            attention=attention,
            document_mask=masked,
            tick=bar.advance,
        )
    split = dataset.index.splits["val"]
    baselines = {"gzip_bpb": split.gzip_bpb, "unigram_bpb": split.unigram_bpb}
    return _Measured(result, baselines, str(dataset.directory), length)


def _run_config(loaded: Loaded) -> RunConfig | None:
    if loaded.run_dir is None:
        return None
    try:
        return RunConfig.model_validate(loaded.run["config"])
    except ValidationError as error:
        raise UsageError(f"{loaded.run_dir / 'run.json'}: config.{first_problem(error)}") from None


def _has_data(config: RunConfig | None) -> bool:
    """Whether a run's own validation data can be measured besides the tasks; says so where it is gone."""
    path = config.data.path if config is not None else None
    if path is None:
        return False
    if not Path(path).is_dir():
        say(f"no bits per byte: the run's data is not at {path} any more")
        return False
    return True


@dataclass(frozen=True)
class _Attention:
    full: str
    windowed: str | None


def _attention(
    loaded: Loaded, length: int, batch_tokens: int, documents: bool, device: torch.device
) -> _Attention:
    """The fastest backends that compute right here at this shape, for full layers and for windowed ones."""
    config = loaded.config
    windows = {config.layer_window(layer) for layer in range(config.num_hidden_layers)}
    names: dict[bool, str] = {}
    for window in windows:
        need = Requirements(
            batch=max(1, min(4, batch_tokens // length)),
            tokens=length,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=loaded.model.activation_dtype,
            device=device,
            window=window,
            documents=documents,
        )
        names[window is not None] = choose(need).name
    return _Attention(names.get(False, names.get(True, "reference")), names.get(True))


def _dataset(loaded: Loaded, config: RunConfig | None, given: str | None, length: int) -> PackedDataset:
    """The validation split, made by the model's own tokenizer."""
    path = given or (config.data.path if config else None)
    if path is None:
        raise UsageError("this model brings no validation data; give --text FILE or --data DIR")
    if given is None and not Path(path).is_dir():
        raise UsageError(
            f"{path}: the run's data is not there any more; give --data DIR (prepared data) or --text FILE"
        )
    dataset = PackedDataset.open(path, split="val", sequence_length=length)
    if dataset.index.tokenizer.checksum != checksum_file(loaded.tokenizer_dir / "tokenizer.json"):
        raise UsageError(
            f"{path}: was made with another tokenizer than the model's; give the text itself with --text FILE"
        )
    return dataset


def _texts(spec: str) -> Iterator[str]:
    for document in iter_documents(
        Source.parse(spec), BadInputLog("refuse", remedy="Mend it, or leave it out.")
    ):
        yield document.text


# Tasks


def _subject(options: Eval, loaded: Loaded, device: torch.device) -> Subject:
    render = _render(loaded.tokenizer_dir) if options.chat else None
    return Subject(
        loaded.model,
        loaded.tokenizer,
        Encoder(loaded.tokenizer, loaded.start_token, always_start=options.start, render=render),
        loaded.eos_tokens,
        options.batch_tokens or BATCH_TOKENS[device.type],
        options.chat,
    )


def _evaluate_tasks(options: Eval, selection: Selection, subject: Subject) -> list[TaskResult]:
    if selection.left_out:
        say(f"no data in {options.tasks_dir} for: {', '.join(selection.left_out)}")
    results = []
    for chosen in selection.chosen:
        items, bad = load(chosen, options.chat)
        if bad.total:
            first = next(f"{reason}, {places[0]}" for reason, places in bad.examples.items())
            say(f"{chosen.name}: {bad.total} damaged records are left out ({first})")
        with Progress(chosen.name, answers_of(chosen, items, options.limit), "answers") as bar:
            result = evaluate(subject, chosen, items, bad, limit=options.limit, tick=bar.advance)
        results.append(result)
        if options.items is not None:
            _append(Path(options.items), result.records)
    return results


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(strict_json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise RunError(f"--items {path}: cannot be written: {error.strerror or error}") from None


def _render(folder: Path) -> Callable[[str], str]:
    """A question -> the text of a chat after which the assistant speaks. Raises UsageError without a template."""
    template = own_template(folder)
    if template is None:
        raise UsageError(
            f"--chat: {folder} has no chat template; leave --chat out, or make a chat model: deskside sft"
        )
    from transformers import AutoTokenizer  # slow to import, and only chats need it

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def render(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )

    return render


# What is printed


def _as_json(
    options: Eval,
    loaded: Loaded,
    measured: _Measured | None,
    selection: Selection | None,
    results: Sequence[TaskResult],
    whole: Core | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "bpb": measured and measured.result.bpb,
        "tasks": {result.chosen.name: result.as_dict() for result in results},
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
    if selection is not None:
        found["core"] = whole and whole.value
        found["core_interval"] = whole and [whole.low, whole.high]
        found["core_tasks"] = list(whole.tasks) if whole else []
        found["left_out"] = list(selection.left_out)
        found |= {"limit": options.limit, "chat": options.chat, "start": options.start}
    return found


def _print_measured(measured: _Measured) -> None:
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
