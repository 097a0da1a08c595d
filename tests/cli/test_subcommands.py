"""The choice of a subcommand, its help and its errors."""

import pytest

from deskside.cli.subcommands import choose_subcommand
from deskside.utils.errors import UsageError


def test_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"make": "make it", "break": "break it"}
    assert choose_subcommand(commands, ["make", "--x"], "deskside thing", "Things.") == "make"
    with pytest.raises(UsageError, match=r"^thing: the command is missing; commands are make, break$"):
        choose_subcommand(commands, [], "deskside thing", "Things.")
    with pytest.raises(UsageError, match=r"^thing mak: there is no such command; did you mean make\?$"):
        choose_subcommand(commands, ["mak"], "deskside thing", "Things.")
    with pytest.raises(SystemExit) as stop:
        choose_subcommand(commands, ["--help"], "deskside thing", "Things.")
    assert stop.value.code == 0
    assert "break it" in capsys.readouterr().out
