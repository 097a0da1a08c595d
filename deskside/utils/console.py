"""Messages on standard error, and the layout of prose and shell commands in the width of a terminal.

Text is broken between words only, so a path can be wider than the terminal. A command can be pasted however long it is:
its lines end in a backslash, and an option stands on one line with its value.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator

DEFAULT_WIDTH = 80  # columns of standard output and standard error that are no terminals
MIN_WIDTH = 20
# A command to copy follows a colon, and ends before a punctuation mark and a space, a bracket, or the end.
WORD = re.compile(r"""(?:[^\s'"\\]|'[^']*'|"(?:\\.|[^"\\])*"|\\.)+""")  # of a shell command, with its quotes
COMMAND = re.compile(r"(?<=: )(?:deskside|pip|ollama|llama-server|sudo) (?:[^,;()]|[,;](?! |$))*(?<![ ,;.])")


def say(text: str) -> None:
    """Print a message on standard error, because standard output is for results only.

    A message is one line in a file. In a terminal it is broken between words.
    """
    if sys.stderr.isatty():
        text = "\n".join(wrap(text, terminal_width()))
    print(text, file=sys.stderr, flush=True)


def say_interrupted(text: str) -> None:
    """Print a message about a signal below the line on which the terminal has shown ^C."""
    say(f"\n{text}" if sys.stderr.isatty() else text)


def terminal_width() -> int:
    """Return the columns of COLUMNS, of the terminal of standard output or error, or `DEFAULT_WIDTH`."""
    columns = shutil.get_terminal_size((0, 0)).columns  # COLUMNS, or standard output
    if not columns and sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    return max(MIN_WIDTH, columns or DEFAULT_WIDTH)


def wrap(text: str, width: int, indent: int = 0, hanging: int = 0) -> list[str]:
    """Return the text in lines of at most `width` columns, broken between words.

    A command to copy (`COMMAND`) is moved to separate lines if it would be broken.
    indent: spaces before every line. hanging: more spaces before all lines but the first of each line of the text.
    """
    lines: list[str] = []
    for paragraph in text.split("\n"):
        if indent + _columns(paragraph) <= width:
            lines.append((" " * indent + paragraph).rstrip())
            continue
        line = " " * (indent + len(paragraph) - len(paragraph.lstrip()))
        empty, next_start = True, line + " " * hanging
        for unit, command in _units(paragraph):
            if not empty and _columns(line) + 1 + _columns(unit) > width:
                lines.append(line)
                line, empty = next_start, True
            if command and _columns(line) + _columns(unit) > width:
                lines += command_lines(command, width, len(next_start))
                line, empty = next_start, True
            else:
                line, empty = line + (unit if empty else f" {unit}"), False
        if line.strip():
            lines.append(line)
    return lines


def _columns(text: str) -> int:
    """Return the columns of a text in a terminal, where a Chinese character has two and a combining mark none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # imports rich, which takes time

    return cell_len(text)


def _units(text: str) -> Iterator[tuple[str, str]]:
    """Yield (word, ""), and (command with the mark that is attached to it, command) for each command to copy."""
    position = 0
    for match in COMMAND.finditer(text):
        yield from ((word, "") for word in text[position : match.start()].split())
        attached = re.match(r"\S*", text[match.end() :])
        position = match.end() + (attached.end() if attached is not None else 0)
        yield text[match.start() : position], match.group()
    yield from ((word, "") for word in text[position:].split())


def command_lines(command: str, width: int, indent: int = 2) -> list[str]:
    """Return a shell command in lines of at most `width` columns that a shell reads as the same command.

    A word that is wider than a line is broken only if it is a TOML list of tables, between two tables.
    """
    start, room = " " * indent, width - indent - 2  # without a space and a backslash
    lines, line = [], ""
    for group in _groups(WORD.findall(command)):
        together = " ".join(group)
        fits = 4 + len(together.partition("},{")[0]) <= room
        for part in [together] if fits else group:
            if line and len(line) + 1 + len(part.partition("},{")[0]) > room:
                lines.append(f"{start}{line} \\")
                line = "    " + part
            else:
                line = f"{line} {part}" if line else part
    lines.append(start + line)
    return [piece for line in lines for piece in _broken_list(line, width)]


def _groups(words: list[str]) -> Iterator[list[str]]:
    """Yield the words of a command in groups: what precedes the options, and each option with its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("-") and group:
            yield group
            group = []
        group.append(word)
    yield group


def _broken_list(line: str, width: int) -> list[str]:
    """Return the line of a command; one that is too wide is broken between the tables of its quoted TOML list."""
    if len(line) <= width or "'[{" not in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    first, *others = line.split("},{")
    return [
        first + "},",
        *(f"{indent}{{{table}}}," for table in others[:-1]),
        *(f"{indent}{{{table}" for table in others[-1:]),
    ]
