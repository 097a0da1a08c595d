"""`deskside eval MODEL --long-context N,...`: options, results of a run for its report, and the table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deskside.cli.eval_options import EvalOptions
from deskside.evaluate.likelihood import ContextEncoder
from deskside.evaluate.long_context import DEPTHS, TASKS, LongContextCell, count_steps, long_context
from deskside.evaluate.run_task import EvaluatedModel
from deskside.run.directory import RunDirectory
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.printer import Printer
from deskside.utils.progress import ProgressBar
from deskside.weights.load import Loaded

TRIALS, SEED = 5, 0


def long_context_lengths(options: EvalOptions) -> list[int]:
    """Return the lengths of --long-context, in tokens. Raises UsageError for invalid ones, and for unused options."""
    if options.long_context is None:
        for name, value in (("--trials", options.trials), ("--long-tasks", options.long_tasks)):
            if value is not None:
                raise UsageError(
                    f"{name}: has no effect without --long-context; add --long-context 2048,16384"
                )
        return []
    parts = [part.strip() for part in options.long_context.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"--long-context {options.long_context!r}: give lengths in tokens, such as 2048,16384"
        )
    return [int(part) for part in dict.fromkeys(parts)]


def long_context_tasks(options: EvalOptions) -> list[str]:
    """Return the names of --long-tasks, by default of all tasks. Raises UsageError for an unknown one."""
    if options.long_tasks is None:
        return list(TASKS)
    names = list(dict.fromkeys(name.strip() for name in options.long_tasks.split(",")))
    for name in names:
        if name not in TASKS:
            raise UsageError(f"--long-tasks {name!r}: is not one of {', '.join(TASKS)}")
    return names


def evaluate_long_context(
    options: EvalOptions,
    names: Sequence[str],
    lengths: Sequence[int],
    loaded: Loaded,
    subject: EvaluatedModel,
) -> list[LongContextCell]:
    """Evaluate the tasks at all lengths. The texts begin with the start token, and are not rendered as a chat.

    The result of a run is written into its directory, for its report; if that fails, the reason is printed.
    """
    if not lengths:
        return []
    trials = options.trials or TRIALS
    encoder = ContextEncoder(loaded.tokenizer, loaded.start_token, always_start=True)
    with ProgressBar("long context", count_steps(names, lengths, trials), "answers") as bar:
        cells = long_context(
            replace(subject, encoder=encoder), names, lengths, trials=trials, seed=SEED, tick=bar.advance
        )
    if loaded.run_dir is not None:
        result = {**long_context_json(cells), "step": loaded.step}
        try:
            RunDirectory(loaded.run_dir).write_json("long_context.json", result)
        except RunError as error:
            say(f"the run's report will not show this long-context evaluation: {error}")
    return cells


def long_context_json(cells: Sequence[LongContextCell]) -> dict[str, Any]:
    """Return the results for JSON."""
    return {"seed": SEED, "cells": [cell.as_dict() for cell in cells]}


def print_long_context(printer: Printer, cells: Sequence[LongContextCell]) -> None:
    """Print a row for each task and length, with the accuracy at each depth and of all."""
    rows = []
    for name, length in dict.fromkeys((cell.task, cell.length) for cell in cells):
        row = [cell for cell in cells if (cell.task, cell.length) == (name, length)]
        by_depth = {cell.depth: f"{cell.accuracy:.0%}" for cell in row}
        texts = sum(cell.n for cell in row)
        everything = sum(cell.recall for cell in row) / texts
        nats = sum(cell.nats for cell in row) / len(row)
        shares = (by_depth.get(depth, "") for depth in DEPTHS)
        rows.append([name, f"{length:,}", *shares, f"{everything:.0%}", str(texts), f"{nats:.2f}"])
    depths = [f"{depth:.0%} deep" for depth in DEPTHS]
    headings = ["task", "tokens", *depths, "all", "texts", "nats"]
    printer.table(headings, rows, "l" + "r" * (len(headings) - 1))
    printer.text(
        "share of the expected words in the answers, measured; nats: mean -ln p of the expected answer",
        "quiet",
    )
