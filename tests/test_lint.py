"""The whole tree is clean: ruff's rules, ruff's formatting, mypy on the package. `make lint` runs the same checks."""

import re
import subprocess
import sys
from collections.abc import Sequence

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
