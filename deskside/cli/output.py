"""Output of the commands: JSON, the result of a run, the next commands."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from deskside.utils import strict_json


def print_json(value: Any, indent: int | None = None) -> None:
    """Print one JSON value on standard output; NaN and infinities become null."""
    print(strict_json.dumps(value, indent=indent))


def finish(outcome: Any, objective: str | None, as_json: bool) -> int:
    """Write the report of a `training_run.RunOutcome`, print its result and return the exit code.

    objective: sft, dpo or grpo; None after pretraining.
    """
    if outcome.is_rank_zero and outcome.status == "finished":
        from deskside.report.write import write_report

        page = write_report(outcome.run.path)
        if as_json:
            print_json(outcome.summary)
        elif objective is None:
            _print_pretrained(outcome.run.path, outcome.summary, page)
        else:
            _print_finetuned(outcome.run.path, objective, outcome.summary, page)
    elif outcome.is_rank_zero and as_json:
        from deskside.weights.checkpoint import find

        saved = find(outcome.run.checkpoints)
        steps = saved[0].step if saved else None  # of the last checkpoint
        path = str(outcome.run.path)
        print_json({"status": "stopped", "signal": outcome.status, "run": path, "steps": steps})
    return int(outcome.exit_code)


def _print_pretrained(path: Path, summary: dict[str, Any], page: Path) -> None:
    def number(value: float | None) -> str:
        return "not known" if value is None else f"{value:.3f}"

    print(f"validation  {number(summary['val_bpb'])} bits per byte")
    print(f"gzip -9     {number(summary['gzip_bpb'])} bits per byte on the same text")
    print(f"unigram     {number(summary['unigram_bpb'])} bits per byte on the same text")
    print(
        f"trained     {summary['tokens']:,} tokens in {summary['seconds']:.0f} s ({summary['clock']} clock)"
    )
    print(f"speed       {speed(summary)}")
    for number_, sample in enumerate(summary["samples"], 1):
        print(f"\nsample {number_}: {sample['prompt']!r} ->")
        print("\n".join(f"  {line}" for line in sample["text"].splitlines()))
    print_next(page, f"chat {path}", f"eval {path}", f"export {path} --to hf --out my-model")


def _print_finetuned(path: Path, name: str, summary: dict[str, Any], page: Path) -> None:
    print(f"held out    {_held_out(name, summary)}")
    print(
        f"trained     {summary['steps']:,} steps, {summary['tokens']:,} tokens in {summary['seconds']:.0f} s"
    )
    print(f"speed       {speed(summary)}")
    for sample in summary["samples"]:
        print(f"\n{sample['prompt']}")
        for label, key in (("before", "before"), ("after", "text"), ("wanted", "reference")):
            if key in sample:
                print(f"  {label}: {' '.join(sample[key].split())[:200]}")
    print_next(page, f"chat {path}", f"export {path} --to hf --out my-model")


def _held_out(name: str, summary: dict[str, Any]) -> str:
    """Return the held-out result of an objective in one line."""
    before = summary["before"]
    if name == "dpo":
        return (
            f"preference accuracy {before['val_accuracy']:.1%} -> {summary['val_accuracy']:.1%} "
            f"({summary['val_pairs']:,} held-out pairs), margin {summary['val_margin']:.3f}, "
            f"KL {summary['val_kl']:.4f} per token"
        )
    if name == "grpo":
        return (
            f"mean reward {before['val_reward']:.3f} -> {summary['val_reward']:.3f} "
            f"({summary['val_questions']:,} held-out questions), {summary['val_answer_tokens']:.0f} tokens per answer"
        )
    return f"{before['val_loss']:.3f} -> {summary['val_loss']:.3f} nats per assistant token"


def speed(summary: dict[str, Any]) -> str:
    """Return the speed of the training steps, and that of the whole run where it is lower."""
    precision = summary["precision"] + (", emulated" if summary["emulated"] else "")
    rate, seconds = summary["tokens_per_second"], summary["seconds"]
    if not rate or not seconds:
        return f"not known, in {precision}"
    overall = summary["tokens"] / seconds
    beside = f"; {overall:,.0f} with set-up, evaluation and checkpoints" if overall < 0.99 * rate else ""
    return f"{rate:,.0f} tokens/s in training steps{beside} ({precision})"


def print_next(page: Path, *commands: str) -> None:
    """Print the path of the report and the commands that usually follow."""
    print(f"\nreport: {page}")
    print("next:")
    for command in commands:
        print(f"  {program()} {command}")


def program() -> str:
    """Return `deskside` as the user's shell finds it: with a path if it is not the one on PATH."""
    own = Path(sys.argv[0])
    found = shutil.which("deskside")
    if own.name != "deskside" or (found is not None and Path(found).samefile(own)):
        return "deskside"
    folder = Path(os.path.abspath(own.parent))
    try:
        return shlex.quote(str(folder.relative_to(Path.cwd()) / own.name))
    except ValueError:
        return shlex.quote(str(folder / own.name))
