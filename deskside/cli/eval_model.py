"""The work of `deskside eval`, apart from its options, which are parsed without torch."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from deskside.cli.answer import print_answer
from deskside.cli.eval_compare import (
    Records,
    check_items,
    compare,
    is_items_file,
    print_differences,
    read_items_file,
)
from deskside.cli.eval_compare import as_json as compare_json
from deskside.cli.eval_long_context import (
    evaluate_long_context,
    long_context_json,
    long_context_lengths,
    long_context_tasks,
    print_long_context,
)
from deskside.cli.eval_options import EvalOptions
from deskside.cli.output import print_json
from deskside.config.run import RunConfig
from deskside.data.chat.renderer import Renderer, read_chat_template
from deskside.engine.device import select_device, select_dtype
from deskside.evaluate.likelihood import ContextEncoder
from deskside.evaluate.long_context import LongContextCell, check_lengths
from deskside.evaluate.parallel_text import ParallelResult, ParallelText, measure_parallel
from deskside.evaluate.run_task import (
    CORE_TASKS,
    Core,
    EvaluatedModel,
    PreparedTask,
    TaskResult,
    check_chat,
    core,
    count_answers,
    evaluate,
)
from deskside.evaluate.tasks import HUB, TaskSelection, Translation, select
from deskside.evaluate.text_bpb import TextBpb, has_own_data, measure, run_config
from deskside.evaluate.translation import check_sacrebleu
from deskside.utils import strict_json
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import plural
from deskside.utils.printer import Printer
from deskside.utils.progress import ProgressBar
from deskside.weights.load import Loaded, load_model, warn_if_unfinished

NEXT_TASK = "arc_easy"  # on the hub, and short enough for every model
BATCH_TOKENS = {"cpu": 8192, "cuda": 65536}  # default tokens per forward pass


def eval_model(options: EvalOptions) -> int:
    """Evaluate the model, print the results, and return the exit code. Raises UsageError and RunError."""
    selection = _selected_tasks(options)
    lengths, long_tasks = long_context_lengths(options), long_context_tasks(options)
    parallel_text = _parallel_text(options)
    device = select_device(options.device)
    tasks = [] if selection is None else _prepare_tasks(options, selection)
    # Before the model is loaded, since both may not fit into memory.
    others = _other_records(options, tasks, device)
    loaded = load_model(options.source, device, select_dtype(device), say, options.base, options.weights)
    warn_if_unfinished(loaded)
    check_lengths(lengths, loaded.config.max_position_embeddings)
    config = run_config(loaded)
    batch_tokens = options.batch_tokens or BATCH_TOKENS[device.type]
    subject = _subject(options, loaded, batch_tokens)
    measured = None
    if not (options.tasks or lengths or parallel_text) or _has_text(options, config):
        measured = measure(
            loaded,
            config,
            device,
            text=options.text,
            data=options.data,
            sequence_length=options.sequence_length,
            batch_tokens=batch_tokens,
        )
    elif options.sequence_length is not None:
        raise UsageError(
            "--sequence-length: is for bits per byte, which are not measured here; add --text FILE or --data DIR"
        )
    cells = evaluate_long_context(options, long_tasks, lengths, loaded, subject)
    parallel = None if parallel_text is None else measure_parallel(loaded, parallel_text, batch_tokens)
    results, failed = _evaluate_tasks(options, tasks, subject)
    differences = None if others is None else compare(results, others)
    # Without the tasks that failed, the mean over CORE's tasks would be another metric.
    core_failed = any(task.chosen.core and task.chosen.name in failed for task in tasks)
    core_result = None if core_failed else core(results)
    if options.json:
        output: dict[str, Any] = {"bpb": None, "tasks": {}, "model": options.model, "step": loaded.step}
        if measured is not None:
            output |= _measured_json(measured)
        if lengths:
            output["long_context"] = long_context_json(cells)
        if parallel is not None:
            output["parallel"] = parallel.as_dict()
        if selection is not None:
            output |= _tasks_json(results, core_result) | {
                "left_out": list(selection.left_out),
                "failed": failed,
                "limit": options.limit,
                "chat": options.chat,
                "start": options.start,
            }
        if differences is not None:
            output["compare"] = compare_json(differences, str(options.compare))
        print_json(output)
        return 1 if failed else 0
    printer = Printer()
    if measured is not None:
        _print_measured(printer, measured)
    if cells:
        print_long_context(printer, cells)
    if parallel is not None:
        _print_parallel(printer, parallel)
    if results:
        _print_tasks(printer, results, core_result)
    if differences:
        print_differences(printer, results, differences, options.model, str(options.compare))
    parts = _found(measured, cells, parallel, results, core_result)
    if parts:
        files = {} if options.items is None else {"items": Path(options.items)}
        model = shlex.quote(options.source)
        commands = [f"eval {model} --tasks {NEXT_TASK} --tasks-dir {HUB}"] if options.tasks is None else []
        print_answer(printer, f"{options.model}: {', '.join(parts)}.", files, *commands, f"chat {model}")
    return 1 if failed else 0


def _has_text(options: EvalOptions, config: RunConfig | None) -> bool:
    return bool(options.text or options.data) or has_own_data(config)


def _selected_tasks(options: EvalOptions) -> TaskSelection | None:
    """Return the selected tasks, None without --tasks. Raises UsageError for invalid options."""
    if options.text is not None and options.data is not None:
        raise UsageError("--text and --data: give one of them")
    for name, value, minimum in (
        ("--batch-tokens", options.batch_tokens, 1),
        ("--limit", options.limit, 1),
        ("--shots", options.shots, 0),
        ("--trials", options.trials, 1),
    ):
        if value is not None and value < minimum:
            raise UsageError(f"{name} {value}: must be at least {minimum}")
    if options.tasks is None:
        for name in ("tasks_dir", "limit", "shots", "chat", "start", "items", "compare"):
            if getattr(options, name) not in (None, False):
                raise UsageError(
                    f"--{name.replace('_', '-')}: has no effect without --tasks; add --tasks core"
                )
        return None
    task_names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not task_names:
        raise UsageError(
            f"--tasks {options.tasks!r}: names no task; give core, all, or names separated by commas"
        )
    selection = select(task_names, options.tasks_dir, options.shots)
    check_chat(selection.chosen, options.chat)
    if translations := [each.name for each in selection.chosen if isinstance(each.task, Translation)]:
        check_sacrebleu(translations)
    return selection


def _parallel_text(options: EvalOptions) -> ParallelText | None:
    """Read the text of --parallel. Raises UsageError for an unreadable one, and for --languages without --parallel."""
    if options.parallel is None:
        if options.languages is not None:
            raise UsageError("--languages: has no effect without --parallel; add --parallel FILE")
        return None
    languages = [name.strip() for name in (options.languages or "").split(",") if name.strip()]
    return ParallelText.read(options.parallel, languages)


def _measured_json(measured: TextBpb) -> dict[str, Any]:
    result = measured.result
    return {
        "bpb": result.bpb,
        "loss": result.loss,
        "tokens": result.tokens,
        "bytes": result.bytes,
        "bpb_by_position": [bucket.as_dict() for bucket in result.by_position],
        "source": measured.source,
        "sequence_length": measured.length,
        **measured.baselines,
        "languages": result.languages_as_dict(),
        "expert_load": result.expert_load,
    }


def _tasks_json(results: Sequence[TaskResult], core_result: Core | None) -> dict[str, Any]:
    return {
        "tasks": {result.chosen.name: result.as_dict() for result in results},
        "core": core_result.value if core_result else None,
        "core_interval": [core_result.low, core_result.high] if core_result else None,
        "core_tasks": list(core_result.tasks) if core_result else [],
    }


# Tasks


def _evaluate_tasks(
    options: EvalOptions, tasks: Sequence[PreparedTask], subject: EvaluatedModel
) -> tuple[list[TaskResult], dict[str, str]]:
    """Return the results of all tasks, and the errors of failed ones. If there is only one task, raises its error."""
    results: list[TaskResult] = []
    failed: dict[str, str] = {}
    for prepared in tasks:
        name = prepared.chosen.name
        try:
            with ProgressBar(name, count_answers(prepared, options.limit), "answers") as bar:
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


def _prepare_tasks(options: EvalOptions, selection: TaskSelection) -> list[PreparedTask]:
    """Read the data of all tasks, report damaged records, and check --items. Raises UsageError."""
    if selection.left_out:
        names = ", ".join(selection.left_out)
        if options.tasks_dir == HUB:
            say(
                f"not on the hub, and so left out: {names}; --tasks-dir DIR reads them from a folder with their files"
            )
        else:
            say(f"no data in {options.tasks_dir} for: {names}")
    tasks = [PreparedTask(chosen, options.chat) for chosen in selection.chosen]
    for task in tasks:
        if task.bad.total:
            reason, places = next(iter(task.bad.examples.items()))
            records = "record is" if task.bad.total == 1 else "records are"
            say(f"{task.chosen.name}: {task.bad.total} damaged {records} left out ({reason}, {places[0]})")
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


def _subject(options: EvalOptions, loaded: Loaded, batch_tokens: int) -> EvaluatedModel:
    renderer = _chat_renderer(loaded) if options.chat else None
    encoder = ContextEncoder(loaded.tokenizer, loaded.start_token, always_start=options.start, chat=renderer)
    return EvaluatedModel(
        loaded.model, loaded.tokenizer, encoder, loaded.eos_tokens, batch_tokens, options.chat
    )


def _other_records(
    options: EvalOptions, tasks: Sequence[PreparedTask], device: torch.device
) -> dict[str, Records] | None:
    """Return the results of --compare by task: from its file, or by evaluating its model. None without --compare."""
    other = options.compare
    if other is None:
        return None
    if is_items_file(other):
        from_file = read_items_file(Path(other))
        check_items(tasks, options.limit, from_file, other)
        return from_file
    loaded = load_model(other, device, select_dtype(device), say)
    subject = _subject(options, loaded, options.batch_tokens or BATCH_TOKENS[device.type])
    records: dict[str, Records] = {}
    for prepared in tasks:
        name = prepared.chosen.name
        with ProgressBar(
            f"{name} of {loaded.name}", count_answers(prepared, options.limit), "answers"
        ) as bar:
            records[name] = evaluate(subject, prepared, limit=options.limit, tick=bar.advance).records
    return records


def _chat_renderer(loaded: Loaded) -> Renderer:
    """Return the renderer of the model's chat template. Raises UsageError if the model has none."""
    if read_chat_template(loaded.tokenizer_dir) is None:
        raise UsageError(
            f"--chat: {loaded.tokenizer_dir} has no chat template; leave --chat out, or train a chat model with "
            f"deskside sft"
        )
    return Renderer(loaded.tokenizer_dir, Tokenizer.from_str(loaded.tokenizer.to_str()))


# Output


def _print_measured(printer: Printer, measured: TextBpb) -> None:
    result = measured.result
    rows = [[f"{result.bpb:.4f}", f"this model (measured), {measured.length} tokens at a time"]]
    for name, value in measured.baselines.items():
        if value is not None:
            rows.append([f"{value:.4f}", f"{name.removesuffix('_bpb')} on the same text"])
    for bucket in result.by_position if len(result.by_position) > 1 else ():
        bpb = "unknown" if bucket.bpb is None else f"{bucket.bpb:.4f}"
        rows.append([bpb, f"positions {bucket.start:,} to {bucket.stop:,} ({bucket.tokens:,} tokens)"])
    for language, one in result.by_language.items():
        rows.append([f"{one.bpb:.4f}", f"{language}, on {one.bytes:,} bytes"])
    printer.table(["bits per byte", f"of {result.bytes:,} bytes of {measured.source}"], rows, "rl")
    printer.text(f"{result.loss:.4f} nats per token on {result.tokens:,} tokens")


def _print_parallel(printer: Printer, parallel: ParallelResult) -> None:
    found = parallel.as_dict()
    first = next(iter(parallel.by_language))
    rows = [
        [language, f"{one['bits_per_sentence']:.1f}", f"{one['relative']:.2f}", f"{one['bpb']:.3f}"]
        for language, one in found["languages"].items()
    ]
    headings = ["language", "bits per sentence", f"against {first}", "bits per byte"]
    printer.table(headings, rows, "lrrr")
    printer.text(f"measured on {found['sentences']:,} sentences of {found['source']}", "quiet")


def _print_tasks(printer: Printer, results: Sequence[TaskResult], core_result: Core | None) -> None:
    translated = [result for result in results if result.correct is None]
    judged = [result for result in results if result.correct is not None]
    rows = []
    for result in translated:
        line = result.as_dict()
        interval = f"{line['low']:.1f} to {line['high']:.1f}"
        scores = (f"{line['chrf++']:.1f}", f"{line['bleu']:.1f}")
        rows.append([*_task_cells(result, f"{line['chrf']:.1f}", interval), *scores])
    if translated:
        headings = ["task", "chrF2", "95 % interval", "items", "shots", "chrF2++", "BLEU"]
        printer.table(headings, rows, "lrrrrrr")
    rows = []
    for result in judged:
        line = result.as_dict()
        interval = f"{line['low']:.1%} to {line['high']:.1%}"
        rows.append([*_task_cells(result, f"{line['accuracy']:.1%}", interval), f"{line['centred']:.3f}"])
    if judged:
        printer.table(["task", "right", "95 % interval", "items", "shots", "centered"], rows, "lrrrrr")
    if core_result is not None:
        interval = f"{core_result.low:.4f} to {core_result.high:.4f}, 95 %"
        of = f"the mean of {len(core_result.tasks)} of the {CORE_TASKS} tasks"
        printer.text(f"CORE-like: {core_result.value:.4f} ({interval}), {of}")
    printer.text("measured" + ("; centered: 0 is guessing, 1 is all correct" if judged else ""), "quiet")


def _task_cells(result: TaskResult, score: str, interval: str) -> list[str]:
    return [result.chosen.name, score, interval, f"{result.n:,}", str(result.chosen.shots)]


def _found(
    measured: TextBpb | None,
    cells: Sequence[LongContextCell],
    parallel: ParallelResult | None,
    results: Sequence[TaskResult],
    core_result: Core | None,
) -> list[str]:
    """Return the results, as parts of a sentence."""
    parts = []
    if measured is not None:
        parts.append(f"{measured.result.bpb:.4f} bits per byte")
    if cells:
        length = max(cell.length for cell in cells)
        longest = [cell for cell in cells if cell.length == length]
        recall = sum(cell.recall for cell in longest) / sum(cell.n for cell in longest)
        parts.append(f"{recall:.0%} of the expected words in texts of {length:,} tokens")
    if parallel is not None:
        bits = [parallel.bits_per_sentence(language) for language in parallel.by_language]
        languages = plural(len(bits), "language")
        parts.append(f"{min(bits):.1f} to {max(bits):.1f} bits per sentence in {languages}")
    if core_result is not None:
        parts.append(f"CORE-like {core_result.value:.4f}")
    judged = [result for result in results if result.correct is not None]
    if judged:
        right, items = sum(result.correct or 0 for result in judged), sum(result.n for result in judged)
        parts.append(f"{right:,.0f} of {items:,} items of {plural(len(judged), 'task')} right")
    if scores := [result.metrics["chrf"] for result in results if result.correct is None]:
        parts.append(f"chrF2 {sum(scores) / len(scores):.1f} in {plural(len(scores), 'translation')}")
    return parts
