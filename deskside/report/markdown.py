"""Blocks -> Markdown (CommonMark with tables), running text wrapped at 80 columns."""

import re
import textwrap
from pathlib import Path

from deskside.report.document import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Figure,
    Paragraph,
    Sample,
    Table,
    clean,
)

COLUMNS = 80


def render(document: Document, folder: Path) -> str:
    """The report as Markdown. Figures are linked relative to `folder`, the directory of the file."""
    parts = [f"# {_inline(document.title)}", _wrapped(f"**{_inline(document.verdict)}**")]
    for section in document.sections:
        parts.append(f"## {_inline(section.title)}")
        parts += [_block(block, folder) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, folder: Path) -> str:
    match block:
        case Paragraph():
            return _wrapped(_inline(block.text))
        case Bullets():
            return "\n".join(_wrapped(_inline(item), "- ", "  ") for item in block.items)
        case Code():
            return _fenced(block.text)
        case Sample():
            return f"Prompt:\n\n{_fenced(block.prompt)}\n\nAnswer:\n\n{_fenced(block.text)}"
        case Table():
            rows = [block.head, tuple("---" for _ in block.head), *block.rows]
            return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)
        case Figure():
            link = block.path.relative_to(folder).as_posix()
            return f"![{_inline(block.title)}]({link})\n\n{_wrapped(_inline(block.caption))}"
        case Details():
            inner = "\n\n".join(_block(part, folder) for part in block.blocks)
            return f"<details><summary>{_inline(block.summary)}</summary>\n\n{inner}\n\n</details>"


def _inline(text: str) -> str:
    """Plain text, on one line, with everything that Markdown or HTML could read as markup escaped."""
    text = " ".join(clean(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]#|~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # an underscore inside a word is no emphasis


def _cell(text: str) -> str:
    return _inline(text) or " "


def _wrapped(text: str, first: str = "", rest: str = "") -> str:
    lines = textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    # A wrapped line must not begin as a list, a heading or a rule would.
    guarded = [lines[0], *(re.sub(r"^(\s*)([-+]|\d+[.)])(?=\s|$)", r"\1\\\2", line) for line in lines[1:])]
    return "\n".join(guarded)


def _fenced(text: str) -> str:
    text = clean(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
