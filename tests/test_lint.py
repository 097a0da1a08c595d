"""The whole tree is clean: ruff's rules, ruff's formatting, mypy on the package. `make lint` runs the same checks."""

import re
import subprocess
import sys

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


def test_comments_stand_above_statements_that_they_would_break() -> None:
    """A long comment after a statement makes ruff break the statement, and the comment then follows a lone bracket."""
    pattern = re.compile(r"^\s*[\])}]+:?,?  # (?!fmt:|type:|noqa)")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("deskside", "benchmarks", "tests")
        for path in files(ROOT / folder, "*.py")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if pattern.match(line)
    ]
    assert found == []
