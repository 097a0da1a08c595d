"""Spellings of a run's length that a new user tries."""

import json
from pathlib import Path

import pytest

from deskside.cli import train as train_command
from deskside.config.duration import parse_hours
from deskside.utils.errors import UsageError


@pytest.mark.parametrize(
    ("options", "length"),
    [
        (["--steps", "10"], "10 steps"),
        (["--tokens", "10M"], "10M tokens"),
        (["--hours", "2h"], "2h"),
        (["--hours", "90m"], "1h30m"),
        (["--hours", "0.5"], "30m"),
        (["--schedule.hours", "1h30m"], "1h30m"),
    ],
)
def test_lengths(options: list[str], length: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command.run(["demo", "--dry-run", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["schedule"]["length"] == length


@pytest.mark.parametrize(
    "options", [["--hours", "10 steps"], ["--hours", "soon"], ["--steps", "5", "--hours", "1"]]
)
def test_what_is_no_length(options: list[str]) -> None:
    with pytest.raises(UsageError, match="hours"):
        train_command.run(["demo", "--dry-run", *options])
    with pytest.raises(ValueError, match="not a time"):
        parse_hours("10 steps")


def test_a_taken_name_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    argv = ["demo", "--steps", "1", "--runs", str(tmp_path), "--name", "taken"]
    with pytest.raises(UsageError, match="taken exists"):
        train_command.run(argv)
