"""`deskside completion`: shell completion for bash, zsh and fish."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from deskside.cli.options import Command, option
from deskside.utils.errors import UsageError


@dataclass(kw_only=True)
class CompletionOptions:
    """Print a completion script for a shell.

    Examples:
      deskside completion bash > ~/.local/share/bash-completion/completions/deskside
      deskside completion zsh > ~/.zfunc/_deskside
      deskside completion fish > ~/.config/fish/completions/deskside.fish
    """

    shell: Literal["bash", "zsh", "fish"] = option("the shell", metavar="bash|zsh|fish", positional=True)


COMMAND = Command("completion", CompletionOptions)


def all_commands() -> Iterator[tuple[Command[object], str]]:
    """Yield every command with its line of help. Imports all of them."""
    from deskside.cli.main import COMMANDS

    for module, _, about in COMMANDS.values():
        found = import_module(module)
        for command in getattr(found, "COMMANDS", {"": getattr(found, "COMMAND", None)}).values():
            yield command, about


def run(argv: Sequence[str]) -> int:
    """Run `deskside completion` and return the exit code. Raises UsageError."""
    options = COMMAND.parse(argv)
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs shtab: pip install shtab") from None
    root = argparse.ArgumentParser("deskside", add_help=False)
    groups = {"": root.add_subparsers(metavar="COMMAND")}
    for command, about in all_commands():
        first, _, second = command.name.partition(" ")
        if second and first not in groups:  # `data` has commands of its own
            groups[first] = (
                groups[""].add_parser(first, help=about, add_help=False).add_subparsers(metavar="COMMAND")
            )
        group = groups[first if second else ""]
        group.add_parser(second or first, help=about, parents=[command.parser()], add_help=False)
    print(shtab.complete(root, shell=options.shell))
    return 0
