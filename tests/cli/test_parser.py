"""One parser for the options of all commands: values, defaults, lists, mistakes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import tyro

from deskside.cli.parser import MAY_BE_EMPTY, choose, parse
from deskside.utils.errors import UsageError


@dataclass
class Options:
    """Do a thing with things, whatever they are, at some length, so that this first line is longer than 80 columns.

    Example: deskside thing a b --out x
    """

    things: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="THING...")]
    out: str
    """Where it goes."""
    kind: Literal["fast", "slow"] = "slow"
    """How."""
    share: float | None = None
    count: int = 3
    extra: tuple[str, ...] = ()
    keep: bool = True
    """Forget everything."""
    json: bool = False
    words: Annotated[str | None, MAY_BE_EMPTY] = None


def test_values_and_defaults() -> None:
    options = parse(
        Options, ["a", "b", "--out", "x", "--share", "0.5", "--extra", "p", "q", "--json"], "deskside thing"
    )
    assert options == Options(things=("a", "b"), out="x", share=0.5, extra=("p", "q"), json=True)
    assert type(options) is Options
    assert parse(Options, ["a", "--out=x", "--no-keep", "--kind", "fast"], "t") == Options(
        ("a",), "x", "fast", keep=False
    )
    assert parse(Options, ["a", "--out=x", "--words", ""], "t").words == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "THING... is missing; see deskside thing --help"),
        (["a"], "--out is missing; see deskside thing --help"),
        (["a", "--out"], "--out: its value is missing; see deskside thing --help"),
        (["a", "--out", "x", "--kind", "odd"], "--kind: input should be 'fast' or 'slow', not 'odd'"),
        (["a", "--out", "x", "--share", "half"],
         "--share: input should be a valid number, unable to parse string as a number, not 'half'"),
        (["a", "--out", "x", "--count", "1.5"],
         "--count: input should be a valid integer, unable to parse string as an integer, not '1.5'"),
        (["a", "--out", "x", "--share", "nan"], "--share: input should be a finite number, not 'nan'"),
        (["a", "--out", ""], "--out '': is empty; give a value, or leave it out"),
        (["a", "", "--out", "x"], "THING... '': is empty; give a value, or leave it out"),
        (["a", "--out", "x", "--extra", "b", ""], "--extra '': is empty; give a value, or leave it out"),
        (["a", "--out", "x", "--cuont", "1"], "--cuont: there is no such option; did you mean --count?"),
        (["a", "--out", "x", "--things", "1"], "--things: there is no such option; see deskside thing --help"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("columns", ["80", "30", "200"])
def test_mistakes_are_one_line(
    argv: Sequence[str],
    message: str,
    columns: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(UsageError) as error:
        parse(Options, argv, "deskside thing")
    assert str(error.value) == message
    assert capfd.readouterr() == ("", "")


def test_help_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        parse(Options, ["--help"], "deskside thing")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for part in ("Example: deskside thing a b --out x", "THING...", "Where it goes. (required)", "How. (default: slow)",
                 "{fast,slow}", "--share NUMBER", "--no_keep", "Forget everything."):  # fmt: skip
        assert part in text, part
    assert "None" not in text


def test_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"make": "make it", "break": "break it"}
    assert choose(commands, ["make", "--x"], "deskside thing", "Things.") == "make"
    with pytest.raises(UsageError, match=r"^thing: which command\? one of make, break$"):
        choose(commands, [], "deskside thing", "Things.")
    with pytest.raises(UsageError, match=r"^thing mak: there is no such command; did you mean make\?$"):
        choose(commands, ["mak"], "deskside thing", "Things.")
    with pytest.raises(SystemExit) as stop:
        choose(commands, ["--help"], "deskside thing", "Things.")
    assert stop.value.code == 0
    assert "break it" in capsys.readouterr().out
