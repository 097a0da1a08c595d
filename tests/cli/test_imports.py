"""Modules that a command must not load: help, completion and wrong usage must not wait for torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deskside.cli.commands import COMMANDS
from tests.serve import made_run

# Each takes 0.1 s or more to import.
HEAVY = {"torch", "triton", "transformers", "tokenizers", "datasets", "pyarrow", "matplotlib", "pandas"}
# `import torch` does not load these itself, and a model that is neither compiled nor sharded does not need them.
UNNEEDED = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers",
    "datasets",
    "pandas",
    "scipy",
    "sympy",
    "matplotlib",
}

# Runs the commands one after the other, and prints the exit code and the loaded modules of interest after each.
RUN = """
import contextlib, io, json, sys
from deskside.cli.main import main
found = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
    found.append([arguments, code, sorted(set(json.loads(sys.argv[2])) & set(sys.modules))])
print(json.dumps(found))
"""


def loaded(commands: list[list[str]], modules: set[str]) -> list[tuple[list[str], int, list[str]]]:
    """Return, for each command, its exit code and which of `modules` this and the earlier commands have loaded."""
    arguments = [sys.executable, "-c", RUN, json.dumps(commands), json.dumps(sorted(modules))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def without_work() -> list[tuple[list[str], int]]:
    """Return command lines that do no work, with their exit codes: help and wrong usage of every command."""
    lines: list[tuple[list[str], int]] = [([], 0), (["--version"], 0), (["no-such-command"], 2)]
    for name in COMMANDS:
        lines += [([name, "--help"], 0), ([name, "--no-such-option"], 2)]
    wrong = [
        ["eval", "runs/x", "--limit", "many"],
        ["export", "runs/x", "--out", "x", "--to", "hf", "--dtype", "q8_0"],
        ["serve", "runs/x", "--max-batch", "0"],
        ["chat", "runs/x", "--device", "tpu"],
        ["report"],
    ]
    return lines + [(line, 2) for line in wrong] + [(["completion", "bash"], 0), (["presets"], 0)]


def test_what_does_no_work_loads_nothing_heavy() -> None:
    pytest.importorskip("shtab")
    lines = without_work()
    rows = loaded([line for line, _ in lines], HEAVY)
    assert rows == [(line, code, []) for line, code in lines]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run.make(tmp_path_factory.mktemp("imports")).path


@pytest.mark.parametrize("command", ["eval", "chat"])
def test_a_model_that_is_used_loads_no_compiler_and_no_plots(command: str, small: Path) -> None:
    more = ["--prompt", "the", "--max-new-tokens", "4"] if command == "chat" else ["--json"]
    assert loaded([[command, str(small), "--device", "cpu", *more]], UNNEEDED)[0][1:] == (0, [])
