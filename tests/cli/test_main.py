"""The command line: help that fits the terminal, one-line errors, exit codes, and --debug."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deskside import __version__
from deskside.cli import main as cli
from deskside.cli.commands import COMMANDS
from deskside.cli.main import main
from deskside.utils.errors import RunError, UsageError
from deskside.utils.signals import Interrupted

PACKAGE = Path(cli.__file__).parents[1]
HELPED = [[name] for name in COMMANDS] + [["data", "prepare"], ["data", "verify"], ["data", "show"]]
HELPED += [["facts", name] for name in ("list", "add", "schema")]
HELPED += [["records", name] for name in ("list", "replay", "add")]


def call(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error of a command."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_main_help_lists_every_command_on_one_screen(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(argv, capsys)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80 and len(out.splitlines()) <= 28
    for name, (_, _, what) in COMMANDS.items():
        assert f"  {name} " in out and what in out
    assert "deskside go --preset demo" in out


@pytest.mark.parametrize("argv", HELPED, ids=" ".join)
def test_help_has_an_example_and_fits(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call([*argv, "--help"], capsys)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith(f"usage: deskside {' '.join(argv)} ")
    if argv[0] not in ("data", "facts", "records") or argv[1:]:  # their help lists subcommands with examples
        assert argv == ["presets"] or (
            "Example" in out and f"deskside {' '.join(argv)} " in out.split("Example", 1)[1]
        )


def test_messages_name_commands_that_exist() -> None:
    """Checks every `deskside NAME` in brackets, after a colon or in backticks, in messages and docstrings."""
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"[(`:] ?deskside ([a-z][a-z-]+)", text)}
    assert {"train", "sft", "plan"} <= named <= set(COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"], capsys) == (0, __version__ + "\n", "")


WRONG = [
    (["trian"], "trian: there is no such command; did you mean train?"),
    (["zzz"], "zzz: there is no such command; commands are doctor, probe, plan, go, train, data"),
    (["--verbose"], "--verbose: there is no such command"),
    (["data"], "data: the command is missing; commands are curate, prepare, verify, show"),
    (["data", "shwo"], "data shwo: there is no such command; did you mean show?"),
    (["data", "prepare", "a.txt"], "--out is missing"),
    (["train", "124m", "--optim.lr"], "--optim.lr: its value is missing"),
    (["train", "124m", "--depth", "x"], "--depth: must be a whole number"),
    (["train", "124m", "--modl.hidden_size", "3"], "did you mean --model.hidden-size?"),
    (["eval"], "MODEL is missing"),
    (["chat", "x", "--temperature", "hot"], "--temperature: must be a number"),
    (["export", "x", "--out", "y", "--to", "pdf"], "--to: input should be 'hf'"),
    (["report"], "RUN|STUDY|SEARCH is missing"),
    (["report", "no-such-run"], "no-such-run"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_wrong_usage_is_one_line_and_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(argv, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("deskside: ") and err.count("\n") == 1 and message in err


BUG = "deskside: this is a bug; deskside --debug ... shows where"


class Panic(BaseException):
    """An exception like the panics of Rust libraries, which do not derive from Exception."""


class Mute(Exception):
    """An exception whose __str__ fails."""

    def __str__(self) -> str:
        raise RecursionError


class Fails:
    """A command that raises the given error."""

    def __init__(self, error: BaseException):
        self.error = error

    def __call__(self, argv: Sequence[str]) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (UsageError("no good"), 2, ["deskside: no good"]),
        (RunError("disk full"), 1, ["deskside: disk full"]),
        (
            KeyError("x"),
            1,
            ["deskside: unexpected KeyError: 'x'", BUG],
        ),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (MemoryError(), 1, ["deskside: out of memory"]),
        (
            RuntimeError("CUDA out of memory.\nTried"),
            1,
            ["deskside: out of memory: CUDA out of memory.", cli.GPU_MEMORY_HINT],
        ),
        (ZeroDivisionError(), 1, ["deskside: unexpected ZeroDivisionError", BUG]),
        (ValueError("one\ntwo"), 1, ["deskside: unexpected ValueError: one", BUG]),
        (Panic("at the core"), 1, ["deskside: unexpected Panic: at the core", BUG]),
        (Mute(), 1, ["deskside: unexpected Mute: its message cannot be shown (RecursionError)", BUG]),
        (Interrupted(signal.SIGTERM), 143, ["interrupted by SIGTERM"]),
        (Interrupted(signal.SIGHUP), 129, ["interrupted by SIGHUP"]),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = type(sys)("made_up_command")
    module.run = Fails(error)
    monkeypatch.setitem(sys.modules, "made_up_command", module)
    monkeypatch.setitem(COMMANDS, "fail", ("made_up_command", "run", "fail"))
    assert call(["fail"], capsys) == (code, "", "\n".join(lines) + "\n")
    shown = isinstance(error, (Exception, Panic))
    with pytest.raises(type(error)) if shown else pytest.raises(AssertionError):
        assert main(["--debug", "fail"]) == 0


def waiting(argv: Sequence[str]) -> int:
    """A command that sends a signal to its own process."""
    number = int(argv[0])
    os.kill(os.getpid(), number)
    return 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_determines_the_exit_code(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(handled) for handled in (signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setitem(COMMANDS, "wait", (__name__, "waiting", "wait"))
    assert call(["wait", str(int(number))], capsys)[0] == 128 + number
    assert [signal.getsignal(handled) for handled in (signal.SIGTERM, signal.SIGHUP)] == before


def test_as_a_process() -> None:
    """`python -m deskside` returns the exit code, and prints a traceback only with --debug."""
    plain = subprocess.run(
        [sys.executable, "-m", "deskside", "train", "nope"], capture_output=True, text=True
    )
    assert plain.returncode == 2 and plain.stdout == ""
    assert (
        plain.stderr.startswith("deskside: nope: no such preset; use one of 1.3b, 124m")
        and plain.stderr.count("\n") == 1
    )
    debug = subprocess.run(
        [sys.executable, "-m", "deskside", "--debug", "train", "nope"], capture_output=True, text=True
    )
    assert debug.returncode != 0 and "Traceback" in debug.stderr and "presets.py" in debug.stderr


def test_main_help_imports_no_library() -> None:
    """`deskside --help` took 0.03 s of CPU time, and pydantic alone takes 0.1 s."""
    code = (
        "import sys; from deskside.cli.main import main; main(['--help']); "
        "heavy = {'argparse', 'numpy', 'pydantic', 'rich', 'torch'} & set(sys.modules); sys.exit(bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    """This happens in `deskside train --help | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deskside", "train", "124m", "--dry-run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(60)
    assert "Traceback" not in err and "Exception ignored" not in err, err


def shell(line: str) -> tuple[int, str]:
    """Return the exit code and the output of `python -m deskside LINE` in a shell."""
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m deskside {line}'], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--version > /dev/full", 1, "deskside: standard output: No space left on device\n"),
        ("train --help > /dev/full", 1, "deskside: standard output: No space left on device\n"),
        ("train nope 2> /dev/full", 2, ""),
        ("train nope 2>&-", 2, ""),
        ("train 124m --dry-run >&-", 0, ""),
        (
            "chat x --prompt $'\\xff'",
            2,
            "deskside: '\\udcff': is not UTF-8; if it is a file's name, rename the file\n",
        ),
    ],
)
def test_full_and_closed_streams_and_invalid_utf8(line: str, code: int, said: str) -> None:
    assert shell(line) == (code, said)


def test_characters_outside_the_encoding_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak(argv: Sequence[str]) -> int:
        print("東", sys.stdin.readline(), end="")
        return 0

    monkeypatch.setattr(cli, "_command", lambda name: speak)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x00a\n"), encoding="utf-8"))
    assert main(["chat"]) == 0
    assert out.buffer.getvalue() == b"\\u6771 \\ufffd\x00a\n"  # type: ignore[attr-defined]
    assert sys.stdout is out


def test_help_works_in_a_terminal_of_one_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert call(["train", "--help"], capsys)[0] == 0


def refused(argv: Sequence[str]) -> int:
    return len(Path("/proc/1/none").read_text("utf-8"))


def full_copy(argv: Sequence[str]) -> int:
    raise OSError(28, "No space left on device", "data/tokenizer.json", None, "runs/a/tokenizer.json")


def nameless(argv: Sequence[str]) -> int:
    raise OSError(5, "Input/output error")


def short_of_memory(argv: Sequence[str]) -> int:
    raise MemoryError("Unable to allocate 233. GiB")


@pytest.mark.parametrize(
    "command, said",
    [
        (refused, "/proc/1/none: No such file or directory"),
        (full_copy, "runs/a/tokenizer.json: No space left on device"),
        (nameless, "Input/output error"),
        (short_of_memory, "out of memory: Unable to allocate"),
    ],
)
def test_os_errors_are_one_line(
    command: Callable[[Sequence[str]], int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_command", lambda name: command)
    code, out, err = call(["eval"], capsys)
    assert (code, out) == (1, "") and err.startswith(f"deskside: {said}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        ("study batch-quick --out FILE", "--out"),
        ("study batch-quick --out FILE/x", "--out"),
        ("search demo --hours 0.1 --out FILE", "--out"),
        ("search demo --hours 0.1 --out FILE/x --dry-run", "--out"),
        ("export RUN --out FILE/x", "--out"),
        ("import-config CONFIG --out FOLDER/missing/q.toml", "--out"),
        ("train demo --steps 1 --runs FILE", "--runs"),
        ("train demo --steps 1 --runs FILE/x", "--runs"),
        ("train demo --steps 1 --runs /proc/x --compute.device cpu", "--runs"),
        ("data prepare bundled:tiny_shakespeare.txt --out FILE/x", "--out"),
    ],
)
def test_a_folder_that_cannot_be_is_wrong_usage(
    argv: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "q.yml").write_text("base_model: a/b\nlearning_rate: 0.1\n")
    places = {"FILE": "file", "FOLDER": ".", "CONFIG": "q.yml", "RUN": "run"}
    words = re.sub("|".join(places), lambda found: places[found[0]], argv).split()
    assert main(words) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("deskside: warning")]
    assert len(said) <= 2  # no plan before it
    assert said[-1].startswith(f"deskside: {option} ")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("train demo --dry-run --steps 0", "--steps 0: "),
        ("train demo --dry-run --hours x", "--hours x: "),
        ("go --preset demo --hours 0.1 --yes --steps 0", "--steps 0: "),
        ("go --preset demo --hours 0.1 --yes --tokens 1e30", "--tokens 1e30: "),
        ("go demo --hours 0.1 --yes", "--preset demo?"),
        ("train wrong.toml --dry-run --steps 1", "wrong.toml: nme: "),
        ("train nested.toml --dry-run --steps 1", "nested.toml: optim.lrr: "),
        ("data show nothere", "no such folder"),
        ("study studies/nothere --resume", "studies/nothere: no such folder"),
        ("data prepare few.jsonl --out data", "JSON that does not parse"),
        ("data prepare bundled:foo --out data", "Bundled: tiny_indic.jsonl, tiny_shakespeare.txt."),
        ("data prepare named.jsonl --out data", "--field content"),
    ],
)
def test_errors_name_what_was_given(
    argv: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text("nme = 3\n")
    (tmp_path / "nested.toml").write_text(
        'base = "demo"\n[optim]\nlrr = 2\n[model.rope_scaling]\nfactor = 2.0\n'
    )
    (tmp_path / "few.jsonl").write_text('{"text": "hi"}\nbad\nworse\n')
    (tmp_path / "named.jsonl").write_text('{"content": "hi"}\n')
    assert main(argv.split()) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
