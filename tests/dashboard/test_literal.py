"""Names from a study are shown literally."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from deskside.dashboard.sidebar import literal


@pytest.mark.parametrize(
    "text",
    [
        "![x](http://127.0.0.1:9/x.png)", "[click](javascript:alert(1))", "<img src=x onerror=alert(1)>",
        "**b** __c__ `d` ~~e~~ $x^2$ :rocket: :red[evil] :material/home:", "http://example.org", "a\\*b &lt; a_b",
    ],
)  # fmt: skip
def test_nothing_is_read_as_markdown(text: str) -> None:
    tokens = MarkdownIt("commonmark").parseInline(literal(text))[0].children or []
    assert {token.type for token in tokens} <= {"text", "text_special"}
    assert "".join(token.content for token in tokens) == text
    assert "\\:" in literal(":red[x]") and "\\$" in literal("$x$")


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30))
def test_every_text_comes_back(text: str) -> None:
    tokens = MarkdownIt("commonmark").parseInline(literal(text))[0].children or []
    assert "".join(token.content for token in tokens) == " ".join(text.split())
