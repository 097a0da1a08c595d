"""Parsing of the options of a command: values, defaults, lists, errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest

from deskside.cli import models, plan
from deskside.cli.options import Command, option
from deskside.utils.errors import UsageError


@dataclass(kw_only=True)
class Options:
    """Do a thing with things, whatever they are, at some length, so that this first line is longer than 80 columns.

    Example: deskside thing a b --out x
    """

    things: tuple[str, ...] = option("", metavar="THING...", positional=True)
    out: str = option("Where it goes.")
    kind: Literal["fast", "slow"] = option("How.", "slow")
    share: float | None = option("Up to 50 %.", None)
    count: int = option("", 3)
    extra: tuple[str, ...] = option("", ())
    keep: bool = option("Forget everything.", True)
    json: bool = option("", False)
    words: str | None = option("", None, may_be_empty=True)


THING = Command("thing", Options)


def test_values_and_defaults() -> None:
    options = THING.parse(["a", "b", "--out", "x", "--share", "0.5", "--extra", "p", "q", "--json"])
    assert options == Options(things=("a", "b"), out="x", share=0.5, extra=("p", "q"), json=True)
    assert type(options) is Options
    assert THING.parse(["a", "--out=x", "--no-keep", "--kind", "fast"]) == Options(
        things=("a",), out="x", kind="fast", keep=False
    )
    assert THING.parse(["--out=x", "a", "--words", ""]) == Options(things=("a",), out="x", words="")
    assert THING.parse(["a", "--extra", "p", "--out=x", "--extra", "q", "--share", "-1"]) == Options(
        things=("a",), out="x", extra=("p", "q"), share=-1.0
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "THING... is missing; see deskside thing --help"),
        (["a"], "--out is missing; see deskside thing --help"),
        (["a", "--out"], "--out: its value is missing; see deskside thing --help"),
        (["a", "--out", "x", "--kind", "odd"], "--kind: input should be 'fast' or 'slow', not 'odd'"),
        (["a", "--out", "x", "--share", "half"],
         "--share: must be a number, not 'half'"),
        (["a", "--out", "x", "--count", "1.5"],
         "--count: must be a whole number, not '1.5'"),
        (["a", "--out", "x", "--share", "nan"], "--share: must be a finite number, not 'nan'"),
        (["a", "--out", ""], "--out '': is empty; give a value, or leave it out"),
        (["a", "", "--out", "x"], "THING... '': is empty; give a value, or leave it out"),
        (["a", "--out", "x", "--extra", "b", ""], "--extra '': is empty; give a value, or leave it out"),
        (["a", "--out", "x", "--cuont", "1"], "--cuont: there is no such option; did you mean --count?"),
        (["a", "--out", "x", "--things", "1"],
         "--things: there is no such option; THING... is written without a name: deskside thing 1"),
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
        THING.parse(argv)
    assert str(error.value) == message
    assert capfd.readouterr() == ("", "")


def test_help_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        THING.parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for part in ("Example: deskside thing a b --out x", "THING...", "Where it goes. (required)", "How. (default: slow)",
                 "{fast,slow}", "--share NUMBER", "--no-keep", "Forget everything.", "Up to 50 %."):  # fmt: skip
        assert part in text, part
    assert "None" not in text


def test_the_help_has_a_section_for_each_kind_of_option() -> None:
    @dataclass(kw_only=True)
    class Grouped:
        """Do something."""

        plain: bool = option("the last", False)
        length: int = option("how long", 1, section="size")
        name: str | None = option("whose", None, metavar="NAME", positional=True)
        width: int = option("how wide", 1, section="size")

    def titles(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.endswith(":")]

    text = Command("grouped", Grouped).help()
    assert titles(text) == ["arguments:", "size:", "options:"]
    assert text.index("NAME  ") < text.index("--length") < text.index("--width") < text.index("--plain")
    parsed = Command("grouped", Grouped).parse(["x", "--width", "2"])
    assert (parsed.name, parsed.width, parsed.length) == ("x", 2, 1)
    text = models.COMMAND.help()
    assert titles(text)[1:] == ["arguments:", "memory that fine-tuning needs:", "options:"]
    assert text.index("options:\n") < text.index("--json  ")
    # No section hides a group of the configuration.
    assert set(titles(plan.COMMAND.help("all"))) >= {"budget, for which the best model is found:", "model:"}


@dataclass
class Wrapped:
    """Do something.

    This sentence is long enough to be wrapped in the source code, and it goes on in the next line of the docstring for
    a few words.
    This one is separate.

    Examples:
      deskside wrapped
    """


def test_a_sentence_is_wrapped_for_the_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        Command("wrapped", Wrapped).parse(["--help"])
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("This sentence"))
    assert lines[start + 1].endswith("for a few words.")
    assert lines[start + 2] == "This one is separate." and "  deskside wrapped" in lines
