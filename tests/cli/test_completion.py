"""Completion scripts name every command and option, and the shell can read them; presets say their size."""

import json
import shutil
import subprocess

import pytest

from deskside.cli import main as cli
from deskside.cli.completion import all_commands
from deskside.cli.main import main
from deskside.config.presets import RENAMED


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*cli.COMMANDS, "prepare", "optim.weight-decay", "minutes-per-arm", "align.beta"):
        assert word in script, word
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0


def test_every_command_parses_its_own_options() -> None:
    assert [command.name.split()[0] for command, _ in all_commands() if " " not in command.name] == [
        name for name in cli.COMMANDS if name != "data"
    ]


def test_presets_say_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    for name, row in rows.items():
        unit = {"m": 1e6, "b": 1e9}.get(name[-1])
        if unit and name[0].isdigit():
            assert row["parameters"] == pytest.approx(float(name[:-1]) * unit, rel=0.01)
    for old, new in RENAMED.items():
        assert rows[new]["aliases"] == [old]
        counts = []
        for name in (old, new):
            assert main(["train", name, "--dry-run", "--json"]) == 0
            counts.append(json.loads(capsys.readouterr().out)["parameters"]["total"])
        assert counts == [rows[new]["parameters"]] * 2
