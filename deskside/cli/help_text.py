"""Layout of help texts: the width of the terminal, wrapped sentences, examples that can be copied."""

import argparse
import inspect
import shutil
from collections.abc import Sequence
from typing import Any

from deskside.utils.console import command_lines, wrap


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the line breaks of the description and omits the options from the usage line."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=columns())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage(usage, [], [], prefix)


def description(docstring: str) -> str:
    """Return the docstring of a command's options as lines in the width of the terminal. An example is one command."""
    lines: list[str] = []
    for line in _joined_sentences(inspect.cleandoc(docstring).splitlines()):
        lines += command_lines(line, columns()) if line.startswith("  deskside ") else wrap(line, columns())
    return "\n".join(lines)


def _joined_sentences(lines: Sequence[str]) -> list[str]:
    """Return the lines with wrapped sentences joined into one line each.

    Docstrings are wrapped for the source code, but terminals are narrower. Indented lines do not change.
    """
    joined: list[str] = []
    for line in lines:
        last = joined[-1] if joined else ""
        if last and line and not last.startswith(" ") and not line.startswith(" ") and last[-1] not in ".:":
            joined[-1] = f"{last} {line}"
        else:
            joined.append(line)
    return joined


def columns() -> int:
    """Return the width of help texts: that of the terminal, from 40 to 100 columns."""
    return max(40, min(100, shutil.get_terminal_size().columns))
