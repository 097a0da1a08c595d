"""The answer at the end of a command's output: what was found, where it is, and what to do next."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deskside.budget.shape import num_params
from deskside.cli.output import print_json, program_name
from deskside.run.directory import RunDirectory
from deskside.run.validation import (
    BASELINES,
    baselines,
    partial_text,
    told_baselines,
)
from deskside.utils.format import count, elapsed, plural
from deskside.utils.printer import Printer

NO_FILES: Mapping[str, Path] = MappingProxyType({})
MAX_SAMPLE = 200  # characters of an answer of a fine-tuned model


def print_answer(printer: Printer, answer: str, files: Mapping[str, Path] = NO_FILES, *commands: str) -> None:
    """Print what a command ends with: what was found in one sentence, where it is, and what to do next.

    files: label -> path. commands: without the name of the program.
    """
    printer.text(f"\n{answer}", "strong")
    printer.fields([(label, str(path)) for label, path in files.items()])
    if commands:
        printer.text("next:")
    for command in commands:
        printer.command(f"{program_name()} {command}")


def finish(outcome: Any, objective: str | None, as_json: bool) -> int:
    """Write the report of a finished run, print its result and return the exit code.

    outcome: a `training_run.RunOutcome`; objective: sft, dpo, kto or grpo, None after pretraining.
    """
    if outcome.is_rank_zero and outcome.status == "finished":
        from deskside.report.write import write_report

        page = write_report(outcome.run.path)
        if as_json:
            print_json(outcome.summary)
        elif objective is None:
            _print_pretrained(outcome.run, outcome.summary, page)
        else:
            _print_finetuned(outcome.run, objective, outcome.summary, page)
    elif outcome.is_rank_zero and as_json:
        from deskside.weights.checkpoint_folder import find

        checkpoints = find(outcome.run.checkpoints)  # newest first
        steps = checkpoints[0].step if checkpoints else None
        path = str(outcome.run.path)
        print_json({"status": "stopped", "signal": outcome.status, "run": path, "steps": steps})
    return int(outcome.exit_code)


def _print_pretrained(run: RunDirectory, summary: dict[str, Any], page: Path) -> None:
    printer, path = Printer(), shlex.quote(str(run.path))
    fields = [
        ("validation", _validation(summary)),
        *((f"  {name}", f"{one['bpb']:.3f}") for name, one in (summary["val_languages"] or {}).items()),
        ("gzip -9", f"{_bits_per_byte(summary['gzip_bpb'])} on the same text"),
        ("unigram", f"{_bits_per_byte(summary['unigram_bpb'])} on the same text"),
        ("speed", speed(summary)),
    ]
    printer.fields(fields)
    print_samples(printer, summary["samples"])
    print_answer(
        printer,
        pretraining_answer(run, summary),
        {"run": run.path, "report": page},
        f"chat {path}",
        f"serve {path}",
        f"eval {path}",
        f"export {path} --to hf --out my-model",
    )


def pretraining_answer(run: RunDirectory, summary: dict[str, Any]) -> str:
    """Return what was trained on how much in which time, and how well, in one sentence."""
    loss = summary["val_bpb"]
    size = count(num_params(run.config().model))
    text = f"A model of {size} parameters was trained on {count(summary['tokens'])} tokens in "
    text += f"{elapsed(summary['seconds'])} ({summary['clock']} clock)"
    if loss is None:
        return f"{text}."
    text += f"; it needs {loss:.3f} bits per byte of text that it has not seen"
    if part := partial_text(summary):
        text += f" (on {part})"
    sides = [
        f"{'less' if loss < value else 'more'} than {'gzip -9' if name == 'gzip' else BASELINES[name]} ({value:.3f})"
        for name, value in told_baselines(loss, baselines(summary)).items()
    ]
    return f"{text}{', ' if sides else ''}{' and '.join(sides)}."


def print_samples(printer: Printer, samples: list[dict[str, Any]]) -> None:
    """Print texts that a pretrained model wrote, with their prompts."""
    for number, sample in enumerate(samples, 1):
        language = f" in {sample['language']}" if "language" in sample else ""
        printer.text(f"\nsample {number}{language}: {sample['prompt']!r} ->")
        for line in sample["text"].splitlines():
            printer.text(line, indent=2)


def _validation(summary: dict[str, Any]) -> str:
    part = partial_text(summary)
    return f"{_bits_per_byte(summary['val_bpb'])}{f' on {part}' if part else ''}"


def _bits_per_byte(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3f} bits per byte"


def _print_finetuned(run: RunDirectory, objective: str, summary: dict[str, Any], page: Path) -> None:
    printer, path = Printer(), shlex.quote(str(run.path))
    for sample in summary["samples"]:
        printer.text(f"{sample['prompt']}", hanging=2)
        for label, key in (("before", "before"), ("after", "text"), ("wanted", "reference")):
            if key in sample:
                printer.text(f"{label}: {' '.join(sample[key].split())[:MAX_SAMPLE]}", indent=2, hanging=2)
        printer.text()
    held_out = _held_out(objective, summary)
    if part := partial_text(summary, "the held-out data"):
        held_out += f" (on {part})"
    printer.fields([("held out", held_out), ("speed", speed(summary))])
    print_answer(
        printer,
        f"{plural(summary['steps'], 'step')} in {elapsed(summary['seconds'])} on {count(summary['tokens'])} tokens: "
        f"{held_out}.",
        {"run": run.path, "report": page},
        f"chat {path}",
        f"serve {path}",
        f"export {path} --to hf --out my-model",
    )


def _held_out(objective: str, summary: dict[str, Any]) -> str:
    """Return the results on the held-out data, before and after training, in one line."""
    before = summary["before"]
    if objective == "dpo":
        kl = f", KL {summary['val_kl']:.4f} per token" if "val_kl" in summary else ""
        return (
            f"preference accuracy {before['val_accuracy']:.1%} -> {summary['val_accuracy']:.1%} "
            f"({summary['val_pairs']:,} held-out pairs), margin {summary['val_margin']:.3f}{kl}"
        )
    if objective == "kto":
        return (
            f"loss {before['val_loss']:.4f} -> {summary['val_loss']:.4f} ({summary['val_answers']:,} held-out "
            f"answers), KL {summary['val_kl']:.3f}"
        )
    if objective == "grpo":
        return (
            f"mean reward {before['val_reward']:.3f} -> {summary['val_reward']:.3f} "
            f"({summary['val_questions']:,} held-out questions), {summary['val_answer_tokens']:.0f} tokens per answer"
        )
    return f"{before['val_loss']:.3f} -> {summary['val_loss']:.3f} nats per assistant token"


def speed(summary: dict[str, Any]) -> str:
    """Return the speed of the training steps, and of the whole run if that is more than 1 % lower, as text."""
    precision = summary["precision"] + (", emulated" if summary["emulated"] else "")
    rate, seconds = summary["tokens_per_second"], summary["seconds"]
    if not rate or not seconds:
        return f"not known, in {precision}"
    overall = summary["tokens"] / seconds
    of_run = f"; {overall:,.0f} with set-up, evaluation and checkpoints" if overall < 0.99 * rate else ""
    return f"{rate:,.0f} tokens/s in training steps{of_run} ({precision})"
