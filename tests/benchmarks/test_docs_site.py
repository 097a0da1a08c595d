"""The documentation's site builds strictly, with the generated pages, and its links lead somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from benchmarks.docs_hooks import ROOT_PAGES, on_page_markdown, root_page
from deskside.cli.completion import all_commands
from deskside.config.merge import option_keys
from tests.sources import ROOT

ROOT_DOCUMENTS = ("README.md", "CHANGELOG.md")


class Links(HTMLParser):
    """The targets of links and images of a page, its anchors, and its pieces of code."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.codes: set[str] = set()
        self._code: list[str] | None = None
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "code":
            self._code = []
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        for key in ("href", "src"):
            if value := values.get(key):
                self.targets.append(value)

    def handle_endtag(self, tag: str) -> None:
        if tag == "code" and self._code is not None:
            self.codes.add("".join(self._code))
            self._code = None

    def handle_data(self, data: str) -> None:
        if self._code is not None:
            self._code.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_link_only_to_what_is_there(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html")}
    assert len(pages) > 40
    missing, checked = [], 0
    for path, links in pages.items():
        for target in links.targets:
            address, anchor = urldefrag(target)
            if re.match(r"[a-z]+:", target) or address.startswith("/") or path.name == "404.html":
                continue
            file = (path.parent / unquote(address)).resolve() if address else path
            page = pages.get(file)
            checked += 1
            if not file.exists() or (anchor and page is not None and unquote(anchor) not in page.anchors):
                missing.append((path.name, target))
    assert missing == [] and checked > 1000


def test_generated_pages_are_complete(site: Path) -> None:
    anchors = Links(site / "reference" / "commands.html").anchors
    assert {command.prog.replace(" ", "-") for command, _ in all_commands()} <= anchors
    shown = Links(site / "reference" / "configuration.html").codes
    assert set(option_keys()) <= shown
    assert {"--hours", "--tasks-dir", "true|false"} <= Links(site / "reference" / "commands.html").codes
    for page in ROOT_PAGES:
        assert (site / page).with_suffix(".html").exists()


def test_lists_and_tables_may_follow_a_paragraph_at_once() -> None:
    assert on_page_markdown("Text:\n- one\n  more\n- two\n| a |") == "Text:\n\n- one\n  more\n- two\n| a |"
    assert on_page_markdown("```\nx\n- y\n```\nText\n1. z") == "```\nx\n- y\n```\nText\n\n1. z"


def test_links_of_a_root_document_lead_into_the_docs() -> None:
    assert (
        root_page("[log](docs/log.md) and [site](https://a.b/docs/)")
        == "[log](log.md) and [site](https://a.b/docs/)"
    )


@pytest.mark.parametrize("name", ROOT_DOCUMENTS)
def test_root_documents_link_to_files(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)", text) if not t.startswith("http")]
    assert [target for target in targets if not (ROOT / target).exists()] == []
    assert targets
