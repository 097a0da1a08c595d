"""`deskside completion`: shell completion for bash, zsh and fish."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from deskside.cli import commands  # the name COMMANDS in this module would mean subcommands
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

    shell: Literal["bash", "zsh", "fish"] = option(
        "name of the shell", metavar="bash|zsh|fish", positional=True
    )


COMMAND = Command("completion", CompletionOptions)
PATH_METAVARS = ("DIR", "FILE", "RUN", "STUDY", "SOURCE", "PRESET", "MODEL")  # completed with file names


def all_commands() -> Iterator[tuple[Command[Any], str]]:
    """Yield every command and its one-line description. Imports the modules of all commands."""
    for module_name, _, about in commands.COMMANDS.values():
        module = import_module(module_name)
        if hasattr(module, "COMMANDS"):  # `data` has subcommands
            for command in module.COMMANDS.values():
                yield command, command.summary
        else:
            yield module.COMMAND, about


def run(argv: Sequence[str]) -> int:
    """Run `deskside completion` and return the exit code. Raises UsageError."""
    options = COMMAND.parse(argv)
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs shtab: pip install shtab") from None
    root = argparse.ArgumentParser("deskside", add_help=False)
    # By command, those of its subcommands; "" is the program.
    subparsers = {"": root.add_subparsers(metavar="COMMAND")}
    for command, about in all_commands():
        name, _, subcommand = command.name.partition(" ")
        if subcommand and name not in subparsers:
            parent = subparsers[""].add_parser(name, help=commands.COMMANDS[name][2], add_help=False)
            subparsers[name] = parent.add_subparsers(metavar="COMMAND")
        parser = command.parser()
        for action in parser._actions:
            # The parser accepts any text; the choices are only in the metavar: {a,b}, or a|b in lower case.
            metavar = str(action.metavar)
            if ("," in metavar and metavar[0] == "{") or metavar.islower():
                action.choices = metavar.strip("{}").replace("|", ",").split(",")
            elif any(word in metavar for word in PATH_METAVARS):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        siblings = subparsers[name if subcommand else ""]
        siblings.add_parser(subcommand or name, help=about, parents=[parser], add_help=False)
    print(shtab.complete(root, shell=options.shell))
    return 0
