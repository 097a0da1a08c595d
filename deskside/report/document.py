"""A report made of blocks, and its rendering as HTML and Markdown with the Jinja templates in templates/.

A block that is a string is a paragraph. All text in a block is plain text: Jinja escapes it for HTML, and the filters
below escape it for Markdown, so a sample or a name that looks like markup stays text.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from deskside.report.colors import figure_style, page_style
from deskside.report.svg import inline
from deskside.utils.format import printable

MARKDOWN_COLUMNS = 80


@dataclass(frozen=True)
class Chip:
    """A short verdict with a color that repeats what it says, and an optional detail in plain text beside it.

    kind: a key of `colors.CHIP_COLORS`.
    """

    text: str
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Chips:
    """A row of chips."""

    items: Sequence[Chip]


@dataclass(frozen=True)
class Table:
    """A header row and the rows below it, which have as many cells as the header. The first cell names the row.

    Attributes:
        subheads: Positions of rows that begin a part of the table.
        stacked: On a phone, the cells of a row are stacked, instead of scrolling sideways.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | Chip]]
    subheads: Sequence[int] = ()
    stacked: bool = False


@dataclass(frozen=True)
class KeyNumber:
    """A number that answers a question: `label` is the question in a word, and `note` says what it means."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class KeyNumbers:
    """Numbers side by side in large type."""

    items: Sequence[KeyNumber]


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
    """An SVG file in the directory of the report, written by `svg.save`. Its title is in the picture."""

    path: Path
    title: str
    caption: str


@dataclass(frozen=True)
class Details:
    """Blocks folded behind a one-line summary until the reader opens them. `printed` ones are open on paper."""

    summary: str | Chip
    blocks: Sequence["Block"]
    printed: bool = False


Block = str | Table | Chips | KeyNumbers | Bullets | CodeBlock | Sample | Image | Details


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class ReportDocument:
    """A whole report. `verdict` is its result in one line, `opening` what a reader sees before the first section."""

    title: str
    verdict: str
    sections: Sequence[Section]
    opening: Sequence[Block] = ()


def render_html(document: ReportDocument) -> str:
    """Return one HTML page without scripts, external links or other files. Raises OSError if an image is missing."""
    template = _environment().get_template("report.html.jinja")
    return template.render(document=document, style=Markup(f"{page_style()}\n{figure_style()}"))


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
        "svg": _svg,
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


def _svg(image: Image) -> Markup:
    """Return the markup of an image, with its title and caption as the text for a screen reader."""
    label = escape(printable(f"{image.title}. {image.caption}"))
    return Markup(inline(image.path).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))


def _inline(cell: str | Chip) -> str:
    """Return plain text or a chip on one line, escaped for Markdown and HTML."""
    if isinstance(cell, str):
        text = cell
    else:  # a detail may begin with a bracket of its own
        detail = cell.detail if cell.detail.startswith("(") or not cell.detail else f"({cell.detail})"
        text = f"{cell.text} {detail}".rstrip()
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
