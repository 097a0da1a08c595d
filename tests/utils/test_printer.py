"""Tables, bars and colours of what the commands print."""

import io
import re
from pathlib import Path

import pytest
from rich.text import Text

import deskside
from deskside.utils.printer import MEANINGS, Printer, is_interactive, make_console
from deskside.utils.progress import ProgressBar

PACKAGE = Path(deskside.__file__).parent
ROWS = [
    [
        "grouped-query attention with a long name",
        "0.849",
        "+1.20 % (+0.40 to +2.00 %)",
        "no difference shown",
    ],
    "a group",
    ["  q-norm", "1,234.5", "", "shown: better"],
]
HEADINGS = ["arm", "bits per byte", "difference (95 %)", "verdict"]


def printed(width: int, rows: list[list[str] | str] = ROWS) -> str:  # type: ignore[assignment]
    out = io.StringIO()
    Printer(out, width).table(HEADINGS, rows, "lrrl")
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_a_table_has_every_word_whole_at_any_width(width: int) -> None:
    lines = printed(width).splitlines()
    assert max(map(len, lines)) <= width
    words = {
        word for row in ROWS for cell in ([row] if isinstance(row, str) else row) for word in cell.split()
    }
    found = {word for line in lines for word in line.split()}
    assert words <= found
    assert ("difference (95 %):" in " ".join(" ".join(lines).split())) == (width <= 40)  # blocks of lines


def test_a_word_that_is_wider_than_the_terminal_is_not_cut() -> None:
    name = "x" * 120
    assert name in printed(60, [[name, "1", "2", "3"]]).split()


def test_bars_have_eighths_or_ascii() -> None:
    assert [Printer(io.StringIO(), 80).bar(share, 2) for share in (1.0, 0.5, 0.0, 3 / 16)] == [
        "██",
        "█",
        "▏",
        "▍",
    ]
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert [Printer(ascii_only, 80).bar(share, 4) for share in (1.0, 0.5, 0.0)] == ["####", "##", "#"]


def test_a_colour_repeats_what_the_text_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        out = io.StringIO()
        Printer(out, 80).table(["a", "b"], [["x", Text("works", "good")]], "ll")
        return out.getvalue()

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    plain = shown()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = shown()
    assert "\x1b[32m" in coloured and re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", shown())


def test_forced_colour_draws_no_bars_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with ProgressBar("read", 2, "files") as bar:
        bar.advance(2)
    assert re.fullmatch(r"read: 2 of 2 files, \S+ s elapsed\n", capsys.readouterr().err)
    assert not is_interactive(make_console(stderr=True))


def test_colours_are_named_in_one_module() -> None:
    """Other modules name a meaning. The dashboard and the reports have their own colours for pages and charts."""
    colours = {word for style in MEANINGS.values() for word in style.split()} - {"dim", "bold"}
    named = re.compile(rf"""["'](?:bold |dim )?(?:{"|".join(sorted(colours))}|cyan|blue|magenta)["']""")
    assert len(set(MEANINGS.values())) == len(MEANINGS) == 6
    modules = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("dashboard", "report")
    ]
    assert len(modules) > 300
    for path in modules:
        text = path.read_text("utf-8")
        if path.name != "printer.py":
            assert not named.search(text), f"{path}: use a name of MEANINGS"
            assert not re.search(
                r"rich\.(console|table|style)\b.* import .*(?:Console|Table|Style)\b", text
            ) or (path.name == "callbacks.py"), f"{path}: use deskside.utils.printer"
