"""A report made of blocks, and its rendering as HTML and Markdown with the Jinja templates in templates/.

A block that is a string is a paragraph. All text in a block is plain text: Jinja escapes it for HTML, and the filters
below escape it for Markdown, so a sample or a name that looks like markup stays text.
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

MARKDOWN_COLUMNS = 80


@dataclass(frozen=True)
class Table:
    """A header row and the rows below it, which have as many cells as the header."""

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
    completion: str


@dataclass(frozen=True)
class Image:
    """A PNG file in the directory of the report."""

    path: Path
    title: str
    caption: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded behind a one-line summary until the reader opens them."""

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
        "group_images": _group_images,
        "base64_png": lambda path: base64.b64encode(path.read_bytes()).decode("ascii"),
        "inline": _inline,
        "wrap": _wrap,
        "fence": _fence,
        "link": lambda path, folder: path.relative_to(folder).as_posix(),
    }
    return environment


def _finalize(value: Any) -> Any:
    """Replace unprintable characters in what a template writes."""
    return value if isinstance(value, Markup) else printable(str(value))


def _group_images(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Split blocks into groups of consecutive images, which HTML shows side by side, and groups without images."""
    for is_image, group in groupby(blocks, key=lambda block: isinstance(block, Image)):
        yield is_image, list(group)


def _inline(text: str) -> str:
    """Return plain text on one line, escaped for Markdown and HTML."""
    text = " ".join(printable(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]#|~])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # an underscore inside a word is not emphasis


def _wrap(text: str, initial_indent: str = "", subsequent_indent: str = "") -> str:
    """Wrap text that `_inline` has escaped at MARKDOWN_COLUMNS."""
    lines = textwrap.wrap(
        text,
        MARKDOWN_COLUMNS,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [initial_indent]
    # Escape what would turn a wrapped line into a list item, a heading or a rule.
    return "\n".join(
        [lines[0], *(re.sub(r"^(\s*\d*)([-+=]+|(?<=\d)[.)])(?=\s|$)", r"\1\\\2", line) for line in lines[1:])]
    )


def _fence(text: str) -> str:
    """Return text in a code fence that is longer than every fence inside it."""
    text = printable(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
