"""Completion scripts contain every command and option and work in their shells; preset names contain the size."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from deskside.cli.commands import COMMANDS
from deskside.cli.completion import all_commands
from deskside.cli.main import main
from deskside.config.presets import RENAMED


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "prepare", "optim.weight-decay", "minutes-per-arm", "align.beta"):
        assert word in script, word
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0


# typed text -> words that the shell suggests
SUGGESTED = {
    "deskside tr": ("train",),
    "deskside data ": ("curate", "prepare", "verify", "show"),
    "deskside train --optim.l": ("--optim.lr",),
    "deskside chat --device ": ("auto", "cpu", "cuda"),
    "deskside chat ./my-": ("my-run",),
}


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the completion script of a shell (the parameter), in a directory that also contains `my-run`."""
    pytest.importorskip("shtab")
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    assert main(["completion", request.param]) == 0
    file = tmp_path / "_deskside"
    file.write_text(capsys.readouterr().out)
    (tmp_path / "my-run").mkdir()
    return file


@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize("line", SUGGESTED)
def test_fish_suggests(script: Path, line: str) -> None:
    call = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(call, cwd=script.parent, capture_output=True, text=True, timeout=60)
    suggested = [row.split("\t")[0].rstrip("/").split("/")[-1] for row in done.stdout.splitlines()]
    assert sorted(suggested) == sorted(SUGGESTED[line])


# `zpty -r` waits until the pattern has been printed. -n writes without a newline. Control-U clears the line.
ZSH = r"""
zmodload zsh/zpty
zpty shell "zsh -f -i"
zpty -w shell "fpath=($PWD \$fpath); autoload -Uz compinit; compinit -u -D; bindkey '^I' list-choices; stty -echo"
zpty -w shell "print REA''DY"
zpty -r shell out '*READY*'
zpty -n -w shell "$1"$'\t'
for word in "${@:2}"; do  # sorted, as zsh lists them
    zpty -r shell out "*$word*" || exit 1
done
print suggested
"""


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
@pytest.mark.parametrize("line", SUGGESTED)
def test_zsh_suggests(script: Path, line: str) -> None:
    call = ["zsh", "-f", "-c", ZSH, "zsh", line, *sorted(SUGGESTED[line])]
    done = subprocess.run(call, cwd=script.parent, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "suggested"


def test_completion_has_every_command() -> None:
    assert [command.name.split()[0] for command, _ in all_commands() if " " not in command.name] == [
        name for name in COMMANDS if name not in ("data", "facts", "records")
    ]


def test_preset_names_match_their_size(capsys: pytest.CaptureFixture[str]) -> None:
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
