"""Commands with subcommands, such as `deskside data prepare`."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deskside.cli.help_text import columns
from deskside.cli.options import Command
from deskside.cli.suggestions import command_hint
from deskside.utils.errors import UsageError


def run_subcommand(
    commands: Mapping[str, Command[Any]],
    functions: Mapping[str, Callable[[Any], int]],
    argv: Sequence[str],
    prog: str,
    description: str,
) -> int:
    """Call the function of the subcommand that argv begins with. Return its exit code.

    functions: called with the options that the subcommand of the same name has parsed. Raises UsageError if the
    subcommand is missing or unknown, or its options are wrong, and what the function raises.
    """
    name = choose_subcommand(
        {name: command.summary for name, command in commands.items()}, argv, prog, description
    )
    return functions[name](commands[name].parse(argv[1:]))


def choose_subcommand(commands: Mapping[str, str], argv: Sequence[str], prog: str, description: str) -> str:
    """Return the name of the subcommand, the first word of argv. --help prints the help and exits.

    commands: one line of help for each subcommand. Raises UsageError if the subcommand is missing or unknown.
    """
    if argv and argv[0] in ("-h", "--help"):
        width = max(len(name) for name in commands)
        lines = "\n".join(
            textwrap.fill(
                f"  {name:<{width}}  {about}",
                columns(),
                subsequent_indent=" " * (width + 4),
                break_on_hyphens=False,
            )
            for name, about in commands.items()
        )
        print(f"usage: {prog} COMMAND [options]\n\n{description}\n\n{lines}\n")
        print(f"Run {prog} COMMAND --help for the options of a command.")
        raise SystemExit(0)
    name = prog.removeprefix("deskside ")
    if not argv:
        raise UsageError(f"{name}: the command is missing; commands are {', '.join(commands)}")
    if argv[0] not in commands:
        raise UsageError(f"{name} {argv[0]}: there is no such command; {command_hint(argv[0], commands)}")
    return argv[0]
