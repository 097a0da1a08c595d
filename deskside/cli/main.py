"""The command line: import the requested command, run it, and turn its errors into exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage; 130, 143 and 129 if SIGINT (Ctrl-C), SIGTERM or SIGHUP stopped the work,
which can be resumed from its checkpoints. A run that ends at its deadline is done. `plan` gives 1 if its answer is no.
`serve` and `dashboard` run until they are stopped, so Ctrl-C and SIGTERM end them with 0, and so does leaving `chat`.
Of several processes (`--gpus`), the error that caused the others decides; one killed by signal N gives 128 + N.
torchrun reports a failure of any of its processes as 1. Tracebacks are printed only with --debug.

A run, checkpoint, model directory or dataset that is damaged or was written by another version gives 1; a path that
does not exist or holds something else gives 2. `report` and `dashboard` show what can still be read.

Standard error has only progress and messages. Output that cannot be written there (`2>&1 | head`, a full disk, a closed
terminal) is dropped and the work continues. Standard output carries results, so a failure to write there is an error.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TextIO, cast

from deskside import __version__
from deskside.cli.commands import COMMANDS
from deskside.utils import launched, signals
from deskside.utils.console import say, say_interrupted
from deskside.utils.errors import RunError, UsageError

GPU_MEMORY_HINT = (
    "deskside: nvidia-smi shows what else uses the GPU; deskside plan --here names options that need less memory; "
    "a training run goes on from its last checkpoint with --resume"
)

USAGE = """usage: deskside COMMAND [--help], such as deskside go --preset demo --hours 0.05
{commands}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    # OpenMP threads spin while they wait for each other, which is fast on an idle machine. On a busy one, a parallel
    # region may spin for a whole time slice until its last thread gets a core. torch reads this when it loads OpenMP.
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = bool(arguments) and arguments[0] == "--debug"
    if debug:
        arguments.pop(0)
    with _streams(), signals.raise_on_termination():
        try:
            try:
                launched.begin()
                return _run(arguments)
            finally:
                sys.stdout.flush()
        except (UsageError, RunError) as error:
            if debug:
                raise
            return _failed(f"deskside: {error}", "error", error.exit_code)
        except KeyboardInterrupt as error:
            code = 128 + signals.signal_number(error)
            return _failed(signals.message(error), "stopped", code, signals.remedies(error))
        except BrokenPipeError:  # the reader of standard output has ended, such as `head`
            return 1
        except OSError as error:
            if debug:
                raise
            # An error in copying a file has two names; the second is that of the copy.
            names = [str(name) for name in (error.filename2 or error.filename,) if name is not None]
            return _failed(": ".join(["deskside", *names, error.strerror or str(error)]), "error", 1)
        except (SystemExit, GeneratorExit):
            raise
        # Panics of Rust libraries and errors of torch.distributed.checkpoint are not subclasses of Exception.
        except BaseException as error:
            if debug:
                raise
            return _unexpected(error)


def _failed(text: str, kind: launched.Kind, code: int, remedies: Sequence[str] = ()) -> int:
    """Print an error, or send it to the launcher of this process, and return the exit code."""
    if not launched.report(text, kind, remedies):
        (say_interrupted if kind == "stopped" else say)(text)
    return code


def _unexpected(error: BaseException) -> int:
    """Report an unexpected exception without its traceback and return the exit code."""
    try:
        message = next(iter(str(error).splitlines()), "")[:500]
    except Exception as str_error:  # noqa: BLE001 - __str__ of a library's exception can raise anything
        message = f"its message cannot be shown ({type(str_error).__name__})"
    colon = ": " if message else ""
    if isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message:
        text = f"deskside: out of memory{colon}{message}"
        if "CUDA" in message:
            text += f"\n{GPU_MEMORY_HINT}"
        return _failed(text, "error", 1)
    bug = "deskside: this is a bug; deskside --debug ... shows where"
    return _failed(f"deskside: unexpected {type(error).__name__}{colon}{message}\n{bug}", "unexpected", 1)


def _run(arguments: list[str]) -> int:
    """Run a command, --help or --version, and return the exit code."""
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
    """Import a command and return its function. Raises UsageError if there is no such command."""
    if name not in COMMANDS:
        from deskside.cli.suggestions import command_hint

        raise UsageError(f"{name}: there is no such command; {command_hint(name, COMMANDS)}")
    module, function, _ = COMMANDS[name]
    command: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
    return command


class _Stream:
    """Standard output or standard error, with handling of write errors (a full disk, a closed pipe or terminal)."""

    def __init__(self, stream: TextIO, name: str | None):
        """name: name of the stream in errors; if it is None, output that cannot be written is dropped instead."""
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._handle(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._handle(error)

    def _handle(self, error: OSError) -> None:
        with contextlib.suppress(io.UnsupportedOperation):
            # Send buffered and later output to /dev/null.
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
    """Open the standard streams that are closed, make them accept every character, and handle write errors."""
    original = sys.stdin, sys.stdout, sys.stderr
    modes = (("r", "replace"), ("w", "backslashreplace"), ("w", "backslashreplace"))
    with contextlib.ExitStack() as stack:
        streams: list[Any] = []
        for stream, (mode, errors) in zip(original, modes, strict=True):
            # Opened in this order, they get the free file descriptors of 0, 1 and 2, so that no other file gets these.
            streams.append(stack.enter_context(open(os.devnull, mode)) if stream is None else stream)
            if isinstance(streams[-1], io.TextIOWrapper):
                streams[-1].reconfigure(errors=errors)
        sys.stdin = streams[0]
        sys.stdout = cast(TextIO, _Stream(streams[1], "standard output"))
        sys.stderr = cast(TextIO, _Stream(streams[2], None))
        try:
            yield
        finally:
            sys.stdin, sys.stdout, sys.stderr = original
