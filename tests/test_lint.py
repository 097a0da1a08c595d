"""The whole tree is clean: ruff's rules, ruff's formatting, mypy on the package, and rules of our own."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.sources import ROOT, files


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--quiet", "--output-format", "concise", "."],
        ["ruff", "format", "--check", "--quiet", "."],
        pytest.param(["mypy"], marks=pytest.mark.full),  # takes 40 s; `make lint` includes it
    ],
    ids=["rules", "formatting", "types"],
)
def test_clean(command: list[str]) -> None:
    pytest.importorskip(command[0])  # a machine that only trains may lack the development tools
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


def lines_with(pattern: str, folders: Sequence[str]) -> list[str]:
    """Return the places of the lines in Python files that match."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in folders
        for path in files(ROOT / folder, "*.py")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.match(pattern, line)
    ]


def test_comments_stand_above_statements_that_they_would_break() -> None:
    """A long comment after a statement makes ruff break the statement, and the comment then follows a lone bracket."""
    assert lines_with(r"\s*[\])}]+:?,?  # (?!fmt:|type:|noqa)", ("deskside", "benchmarks", "tests")) == []


def test_the_first_line_of_an_error_is_taken_in_one_place() -> None:
    """`utils.errors.first_line`: an error without a message has no first line."""
    found = lines_with(r".*str\(\w+\)(\.strip\(\))?\.splitlines\(\)(?!\[-1\])", ("deskside", "benchmarks"))
    # main.py says nothing for an error without a message, and megatron.py takes the last line.
    allowed = {"deskside/cli/main.py", "deskside/export/megatron.py", "deskside/utils/errors.py"}
    assert {place.split(":")[0] for place in found} == allowed


# British spellings. Labels that files and JSON have (modelled, labelled) stay as they are.
STEMS = "dequant|general|initial|item|memor|normal|optim|organ|penal|quant|random|recogn|regular|renormal|stabil|token"
BRITISH = re.compile(
    rf"\b(?:(?:{STEMS})is(?:e[drs]?|ers|ing|ations?)|(?:behavi|col|fav|hon|neighb)our(?:s|ed|ing)?|analys(?:e[ds]?|ing)|"
    r"licences?|centre[ds]?|grey|learnt)\b",
    re.IGNORECASE,
)


def british_words(text: str) -> list[str]:
    """Return the words in British spelling outside of code in backticks, links, and code in braces."""
    return BRITISH.findall(re.sub(r"`[^`\n]*`|\]\([^)]*\)|\{[^{}\n]*\}|\S*[/_]\S*", "", text))


def test_spelling_is_american() -> None:
    pages = [
        *files(ROOT / "docs", "*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ]
    records = {ROOT / "docs/log.md", ROOT / "docs/claims.md"}
    found = {
        str(page.relative_to(ROOT)): words
        for page in pages
        if page not in records and ROOT / "docs/data" not in page.parents
        if (words := british_words(page.read_text("utf-8")))
    }
    for path in files(ROOT / "deskside", "*.py"):
        for line, text in user_visible_texts(path):
            if words := british_words(text):
                found[f"{path.relative_to(ROOT)}:{line}"] = words
    assert found == {}


def user_visible_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of the literals of a module that may be shown: those with spaces that are no docstring.

    In `deskside.cli`, docstrings are the help.
    """
    tree = ast.parse(path.read_text("utf-8"))
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        is_docstring = isinstance(parents[node], ast.Expr)
        if " " in node.value.strip() and (not is_docstring or path.parent.name == "cli"):
            yield node.lineno, node.value
