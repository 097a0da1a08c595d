"""A report as blocks, and its rendering as HTML and Markdown by the Jinja templates beside this file.

A block that is a string is a paragraph. Every text in a block is plain: the HTML environment escapes it automatically
and the Markdown filters escape it here, so a sample or a name that looks like markup stays text.
"""

import base64
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from deskside.utils.format import printable

COLUMNS = 80  # of running text in Markdown


@dataclass(frozen=True)
class Table:
    """Rows under a head; every row has as many cells as the head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Bullets:
    """A list of short texts."""

    items: Sequence[str]


@dataclass(frozen=True)
class CodeBlock:
    """Preformatted text: commands, logs, JSON."""

    text: str


@dataclass(frozen=True)
class Sample:
    """A prompt and the model's completion."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Image:
    """A PNG file in the directory of the report."""

    path: Path
    title: str
    caption: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded until the reader opens them."""

    summary: str
    blocks: Sequence["Block"]


Block = str | Table | Bullets | CodeBlock | Sample | Image | Details


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class ReportDocument:
    """A whole report. `verdict` is its result in one line."""

    title: str
    verdict: str
    sections: Sequence[Section]


def render_html(document: ReportDocument) -> str:
    """Return one HTML page without scripts, external links or other files. Raises OSError if an image is missing."""
    return _environment().get_template("report.html.jinja").render(document=document)


def render_markdown(document: ReportDocument, folder: Path) -> str:
    """Return Markdown (CommonMark with tables) whose images are linked relative to `folder`."""
    return _environment().get_template("report.md.jinja").render(document=document, folder=folder)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize,
    )
    environment.filters |= {
        "image_runs": _image_runs,
        "base64_png": lambda path: base64.b64encode(path.read_bytes()).decode("ascii"),
        "inline": _inline,
        "wrap": _wrap,
        "fence": _fence,
        "link": lambda path, folder: path.relative_to(folder).as_posix(),
    }
    return environment


def _finalize(value: Any) -> Any:
    """Remove unprintable characters from everything that a template writes."""
    return value if isinstance(value, Markup) else printable(str(value))


def _image_runs(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Group neighboring images, which the HTML page shows side by side."""
    for is_image, run in groupby(blocks, key=lambda block: isinstance(block, Image)):
        yield is_image, list(run)


def _inline(text: str) -> str:
    """Return plain text on one line with everything escaped that Markdown or HTML could read as markup."""
    text = " ".join(printable(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]#|~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # an underscore inside a word is not emphasis


def _wrap(text: str, first: str = "", rest: str = "") -> str:
    """Return escaped text on lines of 80 columns."""
    lines = textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first]
    # A wrapped line must not begin like a list item, a heading or a rule.
    return "\n".join(
        [lines[0], *(re.sub(r"^(\s*)([-+]|\d+[.)])(?=\s|$)", r"\1\\\2", line) for line in lines[1:])]
    )


def _fence(text: str) -> str:
    """Return text in a code fence that is longer than every fence inside it."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
