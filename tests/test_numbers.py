"""Measured figures of the documents lead to their data: a file under docs/data, or a dated entry of the log."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
# Not precision.md, whose tables are of formats as well; statistics.md and planner-accuracy.md name the commands that
# make their tables again.
DOCUMENTS = ("README.md", "docs/performance.md", "docs/alignment.md")
FIGURE = re.compile(r"\d[\d,.]*\s*(?:tokens/s|ms|GiB|%|s\b|W\b)|\|\s*\**\d[\d,.]*")
PATH = re.compile(r"docs/data/[\w./*-]+")
FILE = re.compile(r"`([\w.*-]+\.(?:json|jsonl|txt|gz|zst|npz|parquet))`")
LOG = re.compile(r"docs/log\.md|\blog of 20\d\d-\d\d-\d\d|raw data (?:was|were) not kept")


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^(#{1,2} .*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def untraced(text: str) -> list[str]:
    """The sections with a table of figures that name no data."""
    names = {path.name for path in DATA.rglob("*") if path.is_file()}
    found = []
    for heading, body in sections(text).items():
        tables = [line for line in body.splitlines() if line.startswith("|") and FIGURE.search(line)]
        named = PATH.search(body) or LOG.search(body) or any(name in names for name in FILE.findall(body))
        if tables and not named:
            found.append(heading)
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_of_figures_name_their_data(document: str) -> None:
    assert untraced((ROOT / document).read_text("utf-8")) == []


def test_data_that_documents_name_is_there() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        prose = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for name in PATH.findall(prose):
            assert list(ROOT.glob(name.rstrip("./"))), f"{document.name}: {name}"


def test_a_figure_without_data_is_found() -> None:
    table = "## Speed\n\n| arm | tokens/s |\n|---|---|\n| BF16 | 637,300 |\n"
    assert untraced(table) == ["## Speed"]
    assert untraced(table + "\nRaw data in `docs/data/2026-11-22-release/step/`.\n") == []
    assert untraced(table + "\n(`no-such-file.json`)\n") == ["## Speed"]
