"""mkdocs hook: adds the pages that are made from code, and those that lie in the repository's root.

mkdocs.yml names this file; nothing imports it.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from benchmarks.docs_reference import commands_page, configuration_page

ROOT = Path(__file__).parents[1]
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


def root_page(text: str) -> str:
    """Return a document of the repository's root with links that are right inside docs/."""
    return re.sub(r"\]\(docs/", "](", text)
