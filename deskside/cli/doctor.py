"""`deskside doctor`: check this machine and print the findings."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.doctor import summary
from deskside.doctor.examine import Say, examine


@dataclass(kw_only=True)
class DoctorOptions(JsonOption):
    """Check what works on this machine, measure it, and say what to fix. Takes one to five minutes.

    Examples:
      deskside doctor
      deskside doctor --quick --json
    """

    quick: bool = option(
        "check only matmuls, memory, attention and eager training steps; takes some seconds", False
    )


COMMAND = Command("doctor", DoctorOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside doctor`; returns 1 when training cannot work here, else 0. Raises UsageError."""
    options = COMMAND.parse(argv)
    with _progress() as say:
        findings = examine(options.quick, say)
    if options.json:
        print_json(findings)
    else:
        summary.show(findings, Console())
    return 0 if findings["trains"] else 1


@contextmanager
def _progress() -> Iterator[Say]:
    """Show the current check on standard error: a status line in a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(f"doctor: {text}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda text: status.update(text)
