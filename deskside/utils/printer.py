"""Output of the commands for people: text, tables, bars and shell commands, with one meaning for each color."""

import re
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from deskside.utils.console import command_lines, terminal_width, wrap

# The colors of all commands; no other module names one. rich applies NO_COLOR and FORCE_COLOR. A color only repeats
# what the text says.
MEANINGS = {
    "good": "green",  # it works, fits, holds or is better
    "attention": "yellow",  # it needs a decision: tight, slow, skipped, not shown
    "bad": "bold red",  # it failed, is wrong, does not fit or is worse
    "command": "cyan",  # to copy into the shell
    "strong": "bold",  # headings and answers
    "quiet": "dim",  # sources and explanations
}
# Progress bars have no special color.
_PROGRESS = {
    **dict.fromkeys(("bar.complete", "bar.finished", "bar.pulse", "status.spinner"), "default"),
    **dict.fromkeys(("progress.elapsed", "progress.remaining", "progress.download"), "default"),
}
MAX_WIDTH = 100  # columns of text and tables in a wider terminal
GAP = 2  # spaces between the columns of a table, or one where it does not fit otherwise
EIGHTHS = " ▏▎▍▌▋▊▉"  # blocks of 0/8 to 7/8 of a character
WORD = re.compile(r"^\s*\S+|\S+")  # the first of a line with its indentation
Cell = str | Text
Row = Sequence[Cell] | str  # a text is a heading above the following rows


def make_console(file: TextIO | None = None, stderr: bool = False, width: int | None = None) -> Console:
    """Return a rich console with the styles of `MEANINGS`, for a `Printer` or a progress bar."""
    return Console(file=file, stderr=stderr, width=width, highlight=False, theme=Theme(MEANINGS | _PROGRESS))


def is_interactive(console: Console) -> bool:
    """Return True if lines of this console can be drawn again: a terminal, whatever FORCE_COLOR says."""
    return console.file.isatty() and not console.is_dumb_terminal


class Printer:
    """Prints for people on standard output, or on `file`, in the width of the terminal.

    Lines are broken between words. width: columns; default: those of the terminal, at most `MAX_WIDTH`.
    """

    def __init__(self, file: TextIO | None = None, width: int | None = None):
        self.width = width or min(MAX_WIDTH, terminal_width())
        self.console = make_console(file or sys.stdout, width=self.width)

    def text(self, text: Cell = "", style: str = "", indent: int = 0, hanging: int = 0) -> None:
        """Print text. hanging: more spaces before all lines but the first. A `Text` keeps its own styles."""
        if isinstance(text, str):
            lines = [Text(line, style) for line in wrap(text, self.width, indent, hanging)]
        else:
            first, *others = _wrapped(text, self.width - indent, hanging)
            lines = [Text(" " * indent) + first, *(Text(" " * (indent + hanging)) + line for line in others)]
        for line in lines:
            self.console.print(line, soft_wrap=True)

    def heading(self, text: str) -> None:
        """Print an empty line and a heading."""
        self.text(f"\n{text}", "strong")

    def command(self, command: str, indent: int = 2) -> None:
        """Print a shell command that can be copied, in as many lines as it needs."""
        for line in command_lines(command, self.width, indent):
            self.console.print(Text(line, "command"), soft_wrap=True)

    def fields(self, fields: Sequence[tuple[str, Cell]], indent: int = 0) -> None:
        """Print labels and texts in two columns."""
        label_width = max((len(label) for label, _ in fields), default=0) + GAP
        for label, cell in fields:
            text = cell if isinstance(cell, Text) else Text(cell)
            first, *others = _wrapped(text, self.width - indent - label_width)
            self.console.print(
                Text(" " * indent) + Text(label.ljust(label_width), "strong") + first, soft_wrap=True
            )
            for line in others:
                self.console.print(Text(" " * (indent + label_width)) + line, soft_wrap=True)

    def bar(self, share: float, columns: int) -> str:
        """Return a bar of blocks, at least 1/8 of a character long, or of # where the encoding has no blocks."""
        try:
            EIGHTHS.encode(self.console.encoding)
        except UnicodeEncodeError:
            return "#" * max(1, round(share * columns))
        whole, eighths = divmod(max(1, round(8 * share * columns)), 8)
        return ("█" * whole + EIGHTHS[eighths]).rstrip()

    def table(self, headings: Sequence[str], rows: Sequence[Row], align: str, indent: int = 0) -> None:
        """Print a table. Where its words do not fit side by side, print a block of lines for each row.

        align: a letter for each column: l or r for left or right, as in LaTeX.
        """
        cells = [[Text(name, "strong") for name in headings]]
        cells += [[_text(cell) for cell in row] for row in rows if not isinstance(row, str)]
        for gap in (GAP, 1):
            widths = _column_widths(cells, align, self.width - indent - gap * (len(headings) - 1))
            if widths is not None:
                break
        else:
            self._blocks(headings, rows, indent)
            return
        start, between = " " * indent, " " * gap
        if any(headings):
            self._row(cells[0], widths, align, start, between)
        for row in rows:
            if isinstance(row, str):
                self.text(row, "strong", indent)
            else:
                self._row([_text(cell) for cell in row], widths, align, start, between)

    def _row(
        self, cells: Sequence[Text], widths: Sequence[int], align: str, start: str, between: str
    ) -> None:
        columns = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
        for number in range(max(map(len, columns))):
            line = Text(start)
            for lines, width, side in zip(columns, widths, align, strict=True):
                part = lines[number] if number < len(lines) else Text()
                padding = " " * (width - part.cell_len)
                line += Text(padding) + part if side == "r" else part + padding
                line += between
            line.rstrip()
            self.console.print(line, soft_wrap=True)

    def _blocks(self, headings: Sequence[str], rows: Sequence[Row], indent: int) -> None:
        for row in rows:
            if isinstance(row, str):
                self.text(row, "strong", indent)
                continue
            first, *others = row
            lead = indent + len(str(first)) - len(str(first).lstrip())
            self.text(Text(str(first).strip(), "strong"), indent=lead, hanging=2)
            for name, cell in zip(headings[1:], others, strict=True):
                if str(cell):
                    label = f"{' '.join(name.split())}: " if name.strip() else ""
                    self.text(Text(label) + _text(cell), indent=lead + 2, hanging=2)


def _wrapped(text: Text, width: int, hanging: int = 0) -> list[Text]:
    """Return styled text in lines of at most `width` columns, broken between words; all but the first are narrower."""
    lines: list[Text] = []
    for paragraph in text.split("\n", allow_blank=True):
        breaks, start, room = [], 0, width - (hanging if lines else 0)
        for word in WORD.finditer(paragraph.plain):
            if word.start() > start and cell_len(paragraph.plain[start : word.end()]) > room:
                breaks.append(word.start())
                start, room = word.start(), width - hanging
        lines += paragraph.divide(breaks)
    for line in lines:
        line.rstrip()
    return lines


def _words(cell: Text) -> list[str]:
    return [word for line in cell.plain.split("\n") for word in WORD.findall(line)]


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _column_widths(rows: Sequence[Sequence[Text]], align: str, available: int) -> list[int] | None:
    """Return widths in which no word is broken, None if there are none. rows: the headings first.

    Headings are broken into lines before cells, and right-aligned cells, which are numbers, last.
    """
    columns = list(zip(*rows, strict=True))
    natural = [max(map(_longest_line, column)) for column in columns]
    cells = [max(map(_longest_line, column[1:]), default=0) for column in columns]
    narrowest = [
        max(cell_len(word) for cell in column for word in _words(cell) or [""]) for column in columns
    ]
    kept = [max(n, w) if side == "r" else n for n, w, side in zip(narrowest, cells, align, strict=True)]
    least = next((widths for widths in (natural, kept, narrowest) if sum(widths) <= available), None)
    if least is None:
        return None
    # Each further character goes to the column whose cells, and then whose heading, have the most lines.
    widths = list(least)
    for wanted in (cells, natural):
        while sum(widths) < available:
            lines = [want / max(1, have) for want, have in zip(wanted, widths, strict=True)]
            if max(lines) <= 1:
                break
            widths[lines.index(max(lines))] += 1
    return widths


def _longest_line(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split("\n")))
