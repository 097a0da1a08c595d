"""`deskside doctor`: examine this machine and print what was found."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from deskside.cli.parser import parse
from deskside.doctor import summary
from deskside.doctor.examine import Say, examine
from deskside.utils import strict_json


@dataclass
class Doctor:
    """What works on this machine, with what numbers, and what to mend. Takes one to five minutes.

    Example: deskside doctor

    Example: deskside doctor --quick --json
    """

    quick: bool = False
    """Only plain matmuls, memory, the choice of attention and eager training steps: some seconds."""
    json: bool = False
    """Print one JSON object on standard output."""


def run(argv: Sequence[str]) -> int:
    """The command. 0, or 1 when training cannot work here. Raises UsageError."""
    options = parse(Doctor, argv, "deskside doctor")
    with _progress() as say:
        found = examine(options.quick, say)
    if options.json:
        print(strict_json.dumps(found))
    else:
        summary.show(found, Console())
    return 0 if found["trains"] else 1


@contextmanager
def _progress() -> Iterator[Say]:
    """Tells on standard error what is being done: one changing line in a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(f"doctor: {text}", file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield lambda text: status.update(text)
