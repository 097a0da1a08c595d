"""Measured figures in the documents lead to their sources.

A section (# or ##) with a table of figures, or with a paragraph of measured ones, names a file under docs/data, a
dated entry of the log, a table of deskside/facts, a publication, a test that computes the figures again, or a seeded
simulation; or it says that the raw data were not kept. README.md may link to a document that does.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
# log.md is dated; claims.md, records.md and cards/ are generated (tests/report/test_claims_document.py,
# tests/benchmarks/test_records_page.py and test_card_pages.py).
CHECKED = (
    "alignment",
    "architecture",
    "experts",
    "features",
    "index",
    "indicmoe",
    "languages",
    "long-context",
    "models",
    "performance",
    "planner-accuracy",
    "precision",
    "serve",
    "statistics",
    "tutorial",
)
FOLDERS = ("guides", "releases")
DOCUMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in CHECKED),
    *(
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
)
CELL = re.compile(r"\|\s*\**\d[\d,.]*")
# "At 95 %" is a level. A single figure may be a setting or a rule, but two in a paragraph count as a measurement.
FIGURE = re.compile(r"\d[\d,.]*\s*(?:tokens/s|ms\b|GiB|s\b|W\b)|(?<!at )(?<![\d,.])\d[\d,.]*\s*%")
PARAGRAPH_FIGURES = 2
PATH = re.compile(r"(?:docs/data|deskside/facts|tests)/[\w./*-]+")
FILE = re.compile(r"`([\w.*-]+\.(?:json|jsonl|txt|gz|zst|npz|parquet))`")
ELSEWHERE = re.compile(
    r"docs/log\.md|\blog of 20\d\d-\d\d-\d\d|raw data (?:was|were) not kept|facts/measurements\.csv|arXiv \d"
    rf"|python -m benchmarks\.coverage|\]\(docs/(?:{'|'.join(CHECKED)}|claims)\.md"
)


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^(#{1,2} .*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def has_figures(body: str) -> bool:
    prose = re.sub(r"^```.*?^```", "", body, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", prose):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        if any(CELL.search(row) or FIGURE.search(row) for row in rows):
            return True
        if not rows and len(FIGURE.findall(block)) >= PARAGRAPH_FIGURES:
            return True
    return False


def has_source(body: str, names: set[str]) -> bool:
    return bool(
        PATH.search(body) or ELSEWHERE.search(body) or any(name in names for name in FILE.findall(body))
    )


def untraced(text: str) -> list[str]:
    """Return the headings of the sections with figures that name no source."""
    names = {path.name for path in DATA.rglob("*") if path.is_file()}
    return [
        heading
        for heading, body in sections(text).items()
        if has_figures(body) and not has_source(body, names)
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_name_their_source(document: str) -> None:
    assert untraced((ROOT / document).read_text("utf-8")) == []


def test_every_document_is_looked_at() -> None:
    docs = ROOT / "docs"
    every = {path.relative_to(ROOT).as_posix() for path in docs.rglob("*.md") if DATA not in path.parents}
    every -= {path.relative_to(ROOT).as_posix() for path in (docs / "cards").glob("*.md")}
    assert every - set(DOCUMENTS) == {
        "docs/log.md", "docs/claims.md", "docs/records.md", "docs/reference/python.md",
    }  # fmt: skip


def test_sources_that_documents_name_are_there() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        prose = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for name in PATH.findall(prose):
            assert list(ROOT.glob(name.rstrip("./"))), f"{document.name}: {name}"


@pytest.mark.parametrize(
    "figures",
    [
        "| arm | tokens/s |\n|---|---|\n| BF16 | 637,300 |\n",
        "BF16 trains at 637,300 tokens/s and FP8 at 779,500 tokens/s.\n",
    ],
)
def test_a_figure_without_a_source_is_found(figures: str) -> None:
    section = f"## Speed\n\n{figures}"
    assert untraced(section) == ["## Speed"]
    assert untraced(section + "\n(`no-such-file.json`)\n") == ["## Speed"]
    assert untraced(section + "\nRaw data in `docs/data/2026-11-22-release/step/`.\n") == []
    assert untraced("## Speed\n\nA limit of 10 % is the default.\n") == []


def test_the_tests_that_the_findings_cite_exist() -> None:
    text = (ROOT / "docs/data/2026-11-23-audit/findings.md").read_text("utf-8")
    file, cited = "", 0
    for path, name in re.findall(r"(tests/[\w/]+\.py)?::(\w+)", text):
        file, cited = path or file, cited + 1
        assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE), (
            f"{file}::{name}"
        )
    assert cited > 50
