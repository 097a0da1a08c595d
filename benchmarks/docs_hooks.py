"""mkdocs hook: adds the pages that are made from code, and those that lie in the repository's root.

mkdocs.yml names this file; nothing imports it.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from benchmarks.docs_reference import commands_page, configuration_page

ROOT = Path(__file__).parents[1]
MERMAID = "vendor/mermaid/mermaid.min.js"  # of the site, listed in docs/vendor/vendor.toml
IN_SENTENCE = re.compile(r"(?<!<span></span>)<code>[^<]*</code>")  # blocks of code begin with an empty span
PHONE_LINE = 36  # characters of code on a line, in a list
ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    made = {
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        **{page: root_page((ROOT / name).read_text("utf-8")) for page, name in ROOT_PAGES.items()},
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return a page with an empty line before each list and table.

    GitHub, for which the pages are written too, lets them follow a paragraph at once; Python-Markdown does not.
    """
    lines: list[str] = []
    in_code = False
    for line in markdown.splitlines():
        starts = re.match(r"(?:[-*] |\d+\. |\|)", line)
        before = lines[-1] if lines else ""
        in_paragraph = bool(before.strip()) and not re.match(r"(?:\s|[-*] |\d+\. |\||#|>)", before)
        if starts and in_paragraph and not in_code:
            lines.append("")
        in_code ^= line.startswith("```")
        lines.append(line)
    return "\n".join(lines)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Return a page with whole options, and with the library that draws its diagrams, if it has any.

    Without the library, mkdocs-material's script would load it from another host. Guides come first in a search.
    """
    if page.file.src_uri.startswith("guides/"):
        page.meta["search"] = {"boost": 2}
    html = unbroken_options(html)
    if 'class="mermaid"' not in html:
        return html
    return f'{html}\n<script src="{get_relative_url(MERMAID, page.url)}"></script>'


def unbroken_options(html: str) -> str:
    """Return a page in whose sentences and tables code is not broken after a hyphen.

    Words longer than a phone's line may be broken.
    """

    def whole(word: re.Match[str]) -> str:
        return f'<span class="whole">{word[0]}</span>' if len(word[0]) <= PHONE_LINE else word[0]

    return IN_SENTENCE.sub(lambda code: re.sub(r"[^\s<>]*-[^\s<>]*", whole, code[0]), html)


def on_post_page(output: str, **_: object) -> str:
    """Return the HTML of a page whose search has a name for screen readers, which mkdocs-material leaves out."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


def root_page(text: str) -> str:
    """Return a document of the repository's root with links that are right inside docs/."""
    return re.sub(r"\]\(docs/", "](", text)
