"""The command line: find the command, import its package then and not before, turn errors into exit codes.

Exit codes: 0 done, 1 the work failed, 2 wrong usage; 130, 143 and 129 stopped by SIGINT (Ctrl-C), SIGTERM or SIGHUP
before it was done, although what was saved can be resumed. A run that ends at its deadline is done. `serve` has no end
of its own, so Ctrl-C or SIGTERM ends it with 0, and so does leaving `chat`. torchrun reports any of its processes'
failures as 1. No traceback reaches a person unless --debug is given.

A run, checkpoint, model directory or data set given as an argument that is damaged, or that another version wrote, is
1; a path that is not there, or that holds something else, is 2. `report` and `dashboard` show what can still be read.

Standard error only tells what goes on, so losing it (`2>&1 | head`, a full disk, a terminal that was closed) stops no
work: what cannot be written there is dropped. Losing standard output, which carries results, is an error.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TextIO, cast

from deskside import __version__
from deskside.utils import signals
from deskside.utils.errors import RunError, UsageError

# command -> (module, function, what it does)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "doctor": (
        "deskside.cli.doctor",
        "run",
        "what works on this machine, with what numbers, and what to fix",
    ),
    "probe": (
        "deskside.cli.probe",
        "run",
        "measure speed and memory of training here, stored for the planner",
    ),
    "plan": (
        "deskside.cli.plan",
        "run",
        "which model fits and finishes: memory, time, loss, energy, cost",
    ),
    "go": ("deskside.cli.go", "run", "the whole road in a number of hours, from doctor to report"),
    "train": ("deskside.cli.train", "run", "pretrain a model: from a preset, a TOML file, given weights"),
    "data": ("deskside.cli.data", "run", "prepare, verify and show datasets"),
    "sft": ("deskside.cli.sft", "run", "fine-tune a model on conversations, to answer in them"),
    "dpo": ("deskside.cli.dpo", "run", "train a model on preference pairs"),
    "grpo": ("deskside.cli.grpo", "run", "train a model on questions whose answers can be checked"),
    "eval": (
        "deskside.cli.eval",
        "run",
        "bits per byte and tasks of a run or a Hugging Face model",
    ),
    "chat": ("deskside.cli.chat", "run", "talk to a run or a Hugging Face model in the terminal"),
    "serve": ("deskside.cli.serve", "run", "a model behind OpenAI's API, with a page to chat in"),
    "export": (
        "deskside.cli.export",
        "run",
        "write a model for other programs: Hugging Face, GGUF, PEFT",
    ),
    "study": (
        "deskside.cli.study",
        "run",
        "a matrix of configurations, run fairly and compared with error bars",
    ),
    "report": ("deskside.cli.report", "run", "report.md, report.html and plots of a run or a study"),
    "dashboard": (
        "deskside.cli.dashboard",
        "run",
        "look at studies and runs in a browser, also while they go on",
    ),
}

NARROWEST = 30  # columns that help is laid out for

USAGE = f"""deskside {__version__}: plan, train and align language models on the GPU you own

usage: deskside COMMAND [options]

{{commands}}

examples:
  deskside go --preset demo --hours 0.05
                                  three minutes on a CPU, from bundled text
  deskside doctor                 what works on this machine, in numbers
  deskside plan --gpu rtx4090 --hours 24
                                  the best model for a card and a time
  deskside data prepare corpus.jsonl.gz --out data/corpus
  deskside go --hours 24 --data data/corpus
  deskside train 124m --data.path data/corpus --hours 2
  deskside sft runs/go --data chats.jsonl --name chat
  deskside serve runs/chat        OpenAI's API on this machine, and a page
  deskside study architecture --data.path data/corpus --seeds 5 --dry-run
                                  what a comparison would run, and how long

deskside COMMAND --help tells about a command;
deskside --debug COMMAND ... shows tracebacks.

exit codes: 0 done, 1 failed, 2 wrong usage; stopped before it was done:
130 by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP (serve: 0, a stop is its end)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if os.environ.get("COLUMNS", "").isdecimal():
        # tyro lays help out for ever in a terminal of one column.
        os.environ["COLUMNS"] = str(max(NARROWEST, int(os.environ["COLUMNS"])))
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = bool(arguments) and arguments[0] == "--debug"
    if debug:
        arguments.pop(0)
    with _streams(), signals.raised():
        try:
            try:
                return _run(arguments)
            finally:
                sys.stdout.flush()
        except UsageError as error:
            return _failed(error, 2, debug)
        except RunError as error:
            return _failed(error, 1, debug)
        except KeyboardInterrupt as error:
            number = signals.number_of(error)
            by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
            print(f"interrupted{by}", file=sys.stderr)
            return 128 + number
        except BrokenPipeError:  # the reader of our output went away, as `head` does
            return 1
        except OSError as error:
            if debug:
                raise
            # Of two names, as a copy has them, the second is the one that was written.
            names = [str(name) for name in (error.filename2 or error.filename,) if name is not None]
            print(": ".join(["deskside", *names, error.strerror or str(error)]), file=sys.stderr)
            return 1
        except (SystemExit, GeneratorExit):
            raise
        # The last line of defence: a bug is one line, and a traceback on demand. A panic of a library in Rust and a
        # failure in torch.distributed.checkpoint are no `Exception`.
        except BaseException as error:
            if debug:
                raise
            return _unexpected(error)


def _unexpected(error: BaseException) -> int:
    """Print what nobody foresaw in one line; returns the exit code."""
    try:
        said = next(iter(str(error).splitlines()), "")[:500]
    except Exception as broken:  # noqa: BLE001 - __str__ of a library's exception can do anything
        said = f"its message cannot be shown ({type(broken).__name__})"
    colon = ": " if said else ""
    if isinstance(error, MemoryError) or "allocate memory" in said or "out of memory" in said:
        print(f"deskside: out of memory{colon}{said}", file=sys.stderr)
        return 1
    print(f"deskside: unexpected {type(error).__name__}{colon}{said}", file=sys.stderr)
    print("deskside: this is a bug; deskside --debug ... shows where", file=sys.stderr)
    return 1


def _run(arguments: list[str]) -> int:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{argument!a}: is not UTF-8; if it is a file's name, rename the file") from None
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands=_list()), end="")
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    return _command(arguments[0])(arguments[1:])


class _Stream:
    """Standard output or standard error, which may be lost: its reader is gone, its disk full, its terminal closed."""

    def __init__(self, stream: TextIO, name: str | None):
        """`name` is what the error of a lost stream says; None drops the text instead."""
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        with contextlib.suppress(
            io.UnsupportedOperation
        ):  # what is still buffered, and all that follows, goes nowhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._name is not None:
            error.filename = self._name
            raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """The three standard streams: there even where they were closed, and with a way to write every letter."""
    before = sys.stdin, sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        given: list[Any] = []
        for stream, mode, errors in zip(
            before, "rww", ("replace", "backslashreplace", "backslashreplace"), strict=True
        ):
            # Opened in this order they take the numbers 0, 1 and 2, so that no file of ours gets one of these.
            given.append(stack.enter_context(open(os.devnull, mode)) if stream is None else stream)
            if isinstance(given[-1], io.TextIOWrapper):
                given[-1].reconfigure(errors=errors)
        sys.stdin = given[0]
        sys.stdout = cast(TextIO, _Stream(given[1], "standard output"))
        sys.stderr = cast(TextIO, _Stream(given[2], None))
        try:
            yield
        finally:
            sys.stdin, sys.stdout, sys.stderr = before


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        from deskside.cli.parser import nearest

        raise UsageError(f"{name}: there is no such command; {nearest(name, COMMANDS)}")
    module, function, _ = COMMANDS[name]
    command: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
    return command


def _failed(error: Exception, code: int, debug: bool) -> int:
    if debug:
        raise error
    print(f"deskside: {error}", file=sys.stderr)
    return code


def _list() -> str:
    width = max(len(name) for name in COMMANDS)
    return "\n".join(f"  {name:<{width}} {what}" for name, (_, _, what) in COMMANDS.items())
