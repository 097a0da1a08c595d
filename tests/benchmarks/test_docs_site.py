"""The documentation site builds in strict mode with the generated pages, and its links resolve."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from benchmarks.docs_hooks import ROOT_PAGES, on_page_markdown, root_page, unbroken_options
from deskside.cli.completion import all_commands
from deskside.config.merge import option_keys
from tests.chromium import launched_chromium
from tests.dashboard.browsing import serious_faults
from tests.sources import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# One page of each kind: axe takes two seconds per page, and there are fifty pages.
LOOKED_AT = ("index.html", "architecture.html", "languages.html", "cards/l4.html", "tutorial.html")
SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}


class Links(HTMLParser):
    """Collects the targets of a page's links and images, its anchors, and its code blocks."""

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


def test_links_to_other_sites_can_be_addresses(site: Path) -> None:
    """Addresses are checked for their form only, because tests use no network."""
    links = {
        target
        for path in site.rglob("*.html")
        for target in Links(path).targets
        if re.match(r"[a-z]+:", target) and not target.startswith("data:")
    }
    wrong = [
        link
        for link in links
        if not re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]{2,}(?:/[^\s<>\"`{}|\\^]*)?", link)
        and urlsplit(link).hostname not in ("localhost", "127.0.0.1")
    ]
    assert wrong == [] and links


@pytest.fixture
def browser() -> Iterator["Browser"]:
    with launched_chromium() as launched:
        yield launched


def faults_of(
    browser: "Browser", site: Path, names: Iterable[str], size: str, scheme: str
) -> dict[str, object]:
    """Return by page: serious faults found by axe, sideways scrolling, console errors, and requests to other hosts."""
    page = browser.new_page(viewport=SIZES[size], color_scheme=scheme)  # type: ignore[arg-type]
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
    faults: dict[str, object] = {}
    for name in names:
        wrong.clear()
        page.goto((site / name).as_uri())
        if name == "architecture.html":  # the site's script draws it into a shadow tree
            page.locator("div.mermaid").wait_for()
        hidden = page.evaluate(
            "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
        )
        found = [*wrong, *([f"{hidden} px too wide"] if hidden > 0 else [])]
        found += serious_faults(page)
        if found:
            faults[name] = found
    page.close()
    return faults


def test_a_page_of_each_kind_has_no_serious_fault(browser: "Browser", site: Path) -> None:
    assert faults_of(browser, site, LOOKED_AT, "desktop", "light") == {}


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_no_page_has_a_serious_fault(browser: "Browser", site: Path, size: str, scheme: str) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names = [page for page in pages if page != "404.html"]  # its links start at the server's root
    assert len(names) > 50
    assert faults_of(browser, site, names, size, scheme) == {}


@pytest.mark.full
@pytest.mark.parametrize("asked, found", [("--schedule.stages", "cards/"), ("serve", "guides/serve.html")])
def test_files_are_searched_without_a_server(browser: "Browser", site: Path, asked: str, found: str) -> None:
    page = browser.new_page(viewport=SIZES["desktop"])
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").press_sequentially(asked)
    results = page.locator(".md-search-result__link")
    results.first.wait_for()
    assert found in (results.first.get_attribute("href") or "")


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


def test_options_in_sentences_are_not_broken() -> None:
    whole = '<code>go <span class="whole">--hours</span> 2</code>'
    assert unbroken_options("<p><code>go --hours 2</code></p>") == f"<p>{whole}</p>"
    for unchanged in (
        "<pre><span></span><code>go --hours 2</code></pre>",
        f"<p><code>{'a-' * 20}</code> to-day</p>",
    ):
        assert unbroken_options(unchanged) == unchanged


def test_links_of_a_root_document_lead_into_the_docs() -> None:
    assert (
        root_page("[log](docs/log.md) and [site](https://a.b/docs/)")
        == "[log](log.md) and [site](https://a.b/docs/)"
    )


def dead_links(name: str, text: str, tracked: set[str]) -> list[str]:
    """Return links of a document to files that are missing in a clone, including links in HTML but not in code."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", prose)
    dead = []
    for target in map("".join, targets):
        path = unquote(urldefrag(target)[0])
        file = os.path.normpath(os.path.join(os.path.dirname(name), path))
        if path and not re.match(r"[a-z]+:", path) and file not in tracked:
            dead.append(target)
    return dead


def test_documents_link_to_files_that_git_tracks() -> None:
    """A clone contains neither the pages that the site generates nor untracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split("\0") if name]
    tracked = {*files, *(str(folder) for name in files for folder in PurePosixPath(name).parents)}
    pages = [name for name in files if name.endswith(".md") and not name.startswith("docs/data/")]
    assert {"README.md", "CHANGELOG.md", "docs/index.md"} <= {*pages}
    dead = {name: dead_links(name, (ROOT / name).read_text("utf-8"), tracked) for name in pages}
    assert {name: links for name, links in dead.items() if links} == {}


def test_dead_links_are_found() -> None:
    text = '[a](b.md#x) [c](../c.md) [site](https://a.b/c) `[code](d.md)`\n<img src="e.png">\n```\n[f](f.md)\n```\n'
    assert dead_links("docs/a.md", text, {"docs/b.md"}) == ["../c.md", "e.png"]
    assert dead_links("docs/a.md", text, {"docs/b.md", "c.md", "docs/e.png"}) == []
