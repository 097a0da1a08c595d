"""The report as plain blocks, before it is Markdown or HTML.

Every text in a block is plain text: the renderers escape it, so a sample that looks like markup stays a sample.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows under a head; each row has as many cells as the head."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Bullets:
    """A list of short texts."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """Preformatted text: commands, logs, JSON."""

    text: str


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Figure:
    """A PNG file of the run directory, with its words."""

    path: Path
    title: str
    caption: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away until they are asked for."""

    summary: str
    blocks: tuple["Block", ...]


Block = Paragraph | Table | Bullets | Code | Sample | Figure | Details


@dataclass(frozen=True)
class Section:
    """A headed part of the report."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """The whole report: title, the verdict in one line, sections."""

    title: str
    verdict: str
    sections: tuple[Section, ...]


def clean(text: str) -> str:
    """Text without control characters and lone surrogates, which no UTF-8 file or browser can show."""
    text = text.replace("\r\n", "\n").encode("utf-8", errors="replace").decode("utf-8")
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "\ufffd" for c in text)
