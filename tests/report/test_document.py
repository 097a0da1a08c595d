"""Reports show every text as text: no block lets markup through, in HTML or in Markdown."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from deskside.report.document import (
    Bullets,
    Chip,
    CodeBlock,
    Details,
    ReportDocument,
    Sample,
    Section,
    Table,
    render_html,
    render_markdown,
)
from deskside.utils.format import printable

MARKUP = "<script>alert(1)</script><img src=x onerror=y> [a](http://b) ![c](d) **e** `f` | {{ 7 * 7 }} {% raw %} &lt;"


def document(text: str) -> ReportDocument:
    table = Table((text, "b"), [(text, text), ("", text)])
    blocks = [text, Bullets([text, text]), CodeBlock(text), Sample(text, text), table]
    return ReportDocument(text, text, [Section(text, [*blocks, Details(text, blocks)])])


class Page(HTMLParser):
    """Collects the tags and the text of a page outside its style sheet."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(html.split("</style>")[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"class", "scope", "id", "aria-labelledby", "data-head"}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_escapes_every_block() -> None:
    page = Page(render_html(document(MARKUP)))
    assert not page.tags & {"script", "img", "a", "b", "iframe"}
    # Title, verdict, section, summary, blocks.
    assert sum(MARKUP in text.replace("\u00a0", " ") for text in page.texts) == 2 + 1 + 1 + 2 * 10


def test_markdown_escapes_every_block() -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(render_markdown(document(MARKUP), Path(".")))
    inline = [child for token in tokens for child in token.children or []]
    assert {child.type for child in inline} <= {
        "text",
        "text_special",
        "strong_open",
        "strong_close",
        "softbreak",
    }
    html = [token.content for token in tokens if token.type == "html_block"]
    assert (
        all(block.startswith(("<details><summary>&lt;script&gt;", "</details>")) for block in html) and html
    )


@given(st.text(max_size=40))
def test_any_text_comes_back_from_html(text: str) -> None:
    page = Page(render_html(ReportDocument("t", "v", [Section("s", [CodeBlock(f"x{text}x")])])))
    assert f"x{printable(text)}x".replace("\r", "\n") in [t.replace("\r", "\n") for t in page.texts]


@pytest.mark.parametrize("text", ["1. x", "12) x", "- y", "# z", "> w", "+ v", "---", "==="])
def test_wrapped_markdown_never_starts_a_list_or_heading(text: str) -> None:
    for count in range(12, 20):  # after 16 words, the text begins a line
        words = " ".join(["word"] * count)
        paragraph = f"{words} {text} {words} {text}"
        markdown = render_markdown(ReportDocument("t", "v", [Section("s", [paragraph])]), Path("."))
        tokens = MarkdownIt("commonmark").parse(markdown)
        types = [token.type for token in tokens]
        assert types.count("heading_open") == 2 and "bullet_list_open" not in types and "hr" not in types
        assert "ordered_list_open" not in types and "blockquote_open" not in types
        shown = "".join(child.content or " " for child in tokens[-2].children or [])
        assert " ".join(shown.split()) == paragraph


def test_the_detail_of_a_chip_has_one_pair_of_brackets() -> None:
    details = ("", "(-1 to +2 %)", "GQA (-2 to -1 %)")
    table = Table(("a",), [(Chip("not shown", "open", detail),) for detail in details])
    markdown = render_markdown(ReportDocument("t", "v", [Section("s", [table])]), Path("."))
    rows = [line.strip("| ") for line in markdown.splitlines() if "not shown" in line]
    assert rows == ["not shown", "not shown (-1 to +2 %)", "not shown (GQA (-2 to -1 %))"]
