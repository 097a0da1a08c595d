"""`deskside doctor`: check this machine and print the findings."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.doctor import kept_trials, summary
from deskside.doctor.examine import Say, examine
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.format import elapsed
from deskside.utils.printer import Printer, is_interactive, make_console
from deskside.utils.trials import TrialCache


@dataclass(kw_only=True)
class DoctorOptions(JsonOption):
    """Check what works on this machine, measure it, and say what to fix. Takes one to five minutes.

    Examples:
      deskside doctor
      deskside doctor --quick --json
      deskside doctor --trials
    """

    quick: bool = option(
        "check only matmuls, memory, attention, eager training steps and, on a GPU with FP8, the recipe that deskside "
        "go may choose; takes some seconds",
        False,
    )
    trials: bool = option("only list the results of trials that are kept for later runs", False)
    clear_trials: bool = option("only delete these results, so that later runs try again", False)


COMMAND = Command("doctor", DoctorOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside doctor`; returns 1 when training cannot work here, else 0. Raises UsageError."""
    options = COMMAND.parse(argv)
    if options.trials or options.clear_trials:
        return _kept_trials(options)
    with _progress() as say:
        findings = examine(options.quick, say)
    if options.json:
        print_json(findings)
    else:
        summary.show(findings, Printer())
    return 0 if findings["trains"] else 1


def _kept_trials(options: DoctorOptions) -> int:
    """List or delete the kept results of trials; returns 0. Raises UsageError and RunError."""
    if options.quick or (options.trials and options.clear_trials):
        raise UsageError("--trials, --clear-trials, --quick: give one of them")
    cache = TrialCache()
    if options.clear_trials:
        deleted = cache.clear()
        if options.json:
            print_json({"folder": str(cache.folder), "deleted": deleted})
        else:
            print(f"deleted {deleted} kept trials in {cache.folder}")
        return 0
    described = kept_trials.describe(cache)
    if options.json:
        print_json(described)
    else:
        kept_trials.show(described, Printer())
    return 0


@contextmanager
def _progress() -> Iterator[Say]:
    """Show the current check and the elapsed time on standard error, on one line in a terminal."""
    console, began = make_console(stderr=True), time.monotonic()

    def current(text: str) -> str:
        return f"{text}, {elapsed(time.monotonic() - began)}"

    if not is_interactive(console):
        yield lambda text: say(f"doctor: {current(text)}")
        return
    with console.status("") as status:
        yield lambda text: status.update(current(text))
