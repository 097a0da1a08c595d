"""The whole tree is clean: ruff's rules, ruff's formatting, mypy on the package. `make lint` does the same."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--quiet", "--output-format", "concise", "."],
        ["ruff", "format", "--check", "--quiet", "."],
        pytest.param(["mypy"], marks=pytest.mark.full),  # 40 s; `make lint` has it
    ],
    ids=["rules", "formatting", "types"],
)
def test_clean(command: list[str]) -> None:
    pytest.importorskip(command[0])  # a machine that only trains may lack the development tools
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
