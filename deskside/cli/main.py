"""The command line: import the command that was asked for, run it, turn errors into exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage; 130, 143 and 129 when SIGINT (Ctrl-C), SIGTERM or SIGHUP stopped the work,
whose checkpoints can be resumed. A run that ends at its deadline is done. `serve` runs until it is stopped, so Ctrl-C
and SIGTERM end it with 0, and leaving `chat` does too. torchrun reports a failure of any of its processes as 1.
Tracebacks are printed with --debug only.

A run, checkpoint, model directory or dataset that is damaged or was written by another version gives 1; a path that
does not exist or holds something else gives 2. `report` and `dashboard` show what can still be read.

Standard error only reports progress, so losing it (`2>&1 | head`, a full disk, a closed terminal) stops no work: what
cannot be written there is dropped. Losing standard output, which carries results, is an error.
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

# command -> (module, function, one line of help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    name: (f"deskside.cli.{name}", "run", about)
    for name, about in {
        "doctor": "check this machine: what works, how fast, and what to fix",
        "probe": "measure training speed and memory here, for the planner",
        "plan": "which model fits and finishes: memory, time, loss, cost",
        "go": "the full pipeline within a time budget, from doctor to report",
        "train": "pretrain a model from a preset, a TOML file or given weights",
        "data": "prepare, verify and show datasets",
        "sft": "fine-tune a model on conversations",
        "dpo": "train a model on preference pairs",
        "grpo": "reinforcement learning with verifiable rewards",
        "eval": "bits per byte and evaluation tasks",
        "chat": "chat with a model in the terminal",
        "serve": "serve a model with the OpenAI API and a chat page",
        "export": "convert a model: Hugging Face, GGUF, PEFT",
        "study": "compare configurations fairly, with error bars",
        "report": "write the report of a run or a study",
        "dashboard": "browse studies and runs live in a browser",
        "presets": "list the model presets with their parameter counts",
        "completion": "shell completion for bash, zsh and fish",
    }.items()
}

USAGE = """usage: deskside COMMAND [options]    (COMMAND --help shows its options)

{commands}

example: deskside go --preset demo --hours 0.05    three minutes on a CPU
exit codes: 0 done, 1 failed, 2 wrong usage, 130/143/129 stopped by a signal
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    # OpenMP threads spin while they wait for each other. If other work holds a core, every parallel region then takes
    # a time slice of it; on an idle machine spinning is faster. Read when torch loads OpenMP.
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = bool(arguments) and arguments[0] == "--debug"
    if debug:
        arguments.pop(0)
    with _streams(), signals.raise_on_termination():
        try:
            try:
                return _run(arguments)
            finally:
                sys.stdout.flush()
        except (UsageError, RunError) as error:
            if debug:
                raise
            print(f"deskside: {error}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1
        except KeyboardInterrupt as error:
            number = signals.signal_number(error)
            by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
            print(f"interrupted{by}", file=sys.stderr)
            return 128 + number
        except BrokenPipeError:  # the reader of our output went away, as `head` does
            return 1
        except OSError as error:
            if debug:
                raise
            # A copy has two file names; the second is the one being written.
            names = [str(name) for name in (error.filename2 or error.filename,) if name is not None]
            print(": ".join(["deskside", *names, error.strerror or str(error)]), file=sys.stderr)
            return 1
        except (SystemExit, GeneratorExit):
            raise
        # A bug is one line, with a traceback on demand. Panics of Rust libraries and failures of
        # torch.distributed.checkpoint are not subclasses of Exception.
        except BaseException as error:
            if debug:
                raise
            return _unexpected(error)


def _unexpected(error: BaseException) -> int:
    """Print an unexpected exception in one line and return the exit code."""
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
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], *arguments[2:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:<{width}} {about}" for name, (_, _, about) in COMMANDS.items()]
        print(USAGE.format(commands="\n".join(lines)), end="")
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    return _command(arguments[0])(arguments[1:])


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        from deskside.cli.options import nearest_command

        raise UsageError(f"{name}: there is no such command; {nearest_command(name, COMMANDS)}")
    module, function, _ = COMMANDS[name]
    command: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
    return command


class _Stream:
    """Standard output or standard error, which can fail: the reader is gone, the disk full, the terminal closed."""

    def __init__(self, stream: TextIO, name: str | None):
        """`name` is used in the error of a failed stream; None drops the text instead."""
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
        with contextlib.suppress(io.UnsupportedOperation):
            # Buffered and later output goes to /dev/null.
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())
            os.close(devnull)
        if self._name is not None:
            error.filename = self._name
            raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Make the standard streams usable: open even if they were closed, and able to write every character."""
    before = sys.stdin, sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        given: list[Any] = []
        for stream, mode, errors in zip(
            before, "rww", ("replace", "backslashreplace", "backslashreplace"), strict=True
        ):
            # In this order they take file descriptors 0, 1 and 2, so that no other file gets one of these.
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
