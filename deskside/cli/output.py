"""Output of the commands: JSON, the result of a run, and the commands that usually follow."""

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
    """Write the report of a finished run, print its result and return the exit code.

    outcome: a `training_run.RunOutcome`; objective: sft, dpo, kto or grpo, None after pretraining.
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

        checkpoints = find(outcome.run.checkpoints)  # newest first
        steps = checkpoints[0].step if checkpoints else None
        path = str(outcome.run.path)
        print_json({"status": "stopped", "signal": outcome.status, "run": path, "steps": steps})
    return int(outcome.exit_code)


def _print_pretrained(path: Path, summary: dict[str, Any], page: Path) -> None:
    def bpb(key: str) -> str:
        return "not known" if summary[key] is None else f"{summary[key]:.3f}"

    print(f"validation  {bpb('val_bpb')} bits per byte")
    if languages := summary["val_languages"]:
        print("            " + ", ".join(f"{name} {one['bpb']:.3f}" for name, one in languages.items()))
    print(f"gzip -9     {bpb('gzip_bpb')} bits per byte on the same text")
    print(f"unigram     {bpb('unigram_bpb')} bits per byte on the same text")
    print(
        f"trained     {summary['tokens']:,} tokens in {summary['seconds']:.0f} s ({summary['clock']} clock)"
    )
    print(f"speed       {speed(summary)}")
    for number, sample in enumerate(summary["samples"], 1):
        language = f" in {sample['language']}" if "language" in sample else ""
        print(f"\nsample {number}{language}: {sample['prompt']!r} ->")
        print("\n".join(f"  {line}" for line in sample["text"].splitlines()))
    print_next(page, f"chat {path}", f"eval {path}", f"export {path} --to hf --out my-model")


def _print_finetuned(path: Path, objective: str, summary: dict[str, Any], page: Path) -> None:
    print(f"held out    {_held_out(objective, summary)}")
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


def print_next(page: Path, *commands: str) -> None:
    """Print the path of the report and the commands that usually follow."""
    print(f"\nreport: {page}")
    print("next:")
    for command in commands:
        print(f"  {program_name()} {command}")


def program_name() -> str:
    """Return `deskside`, or the path of the running `deskside` script if the shell would not find this one."""
    running = Path(sys.argv[0])
    on_path = shutil.which("deskside")
    if running.name != "deskside" or (on_path is not None and Path(on_path).samefile(running)):
        return "deskside"
    folder = Path(os.path.abspath(running.parent))
    try:
        return shlex.quote(str(folder.relative_to(Path.cwd()) / running.name))
    except ValueError:  # not below the working directory
        return shlex.quote(str(folder / running.name))
