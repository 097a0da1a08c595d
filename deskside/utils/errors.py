"""Errors that the user can act on, printed as one line; --debug shows the traceback (see `cli/main.py`)."""

from collections.abc import Iterator


class UsageError(Exception):
    """Invalid input. The message is one line that says what to do. The command exits with 2."""

    exit_code = 2


class RunError(Exception):
    """A failure while running: disk full, diverged training, damaged checkpoint. The command exits with 1."""

    exit_code = 1


class OutsideError(RunError):
    """A failure outside of the run, such as a server that does not answer. Training saves a checkpoint first."""


class ProcessError(RunError):
    """A failure in one of several processes. The command exits with the exit code of that process."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type without one."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, from the last to the first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def describe_error(error: BaseException) -> str:
    """Return an exception as one line: its type and the first line of its message, shortened to 200 characters."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line[:200]}"
