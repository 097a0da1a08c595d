"""The two errors that users see as one line. Any other exception is a bug; --debug shows its traceback."""


class UsageError(Exception):
    """Invalid input. The message is one line that says what to do. The command exits with 2."""


class RunError(Exception):
    """A failure while running: disk full, diverged training, damaged checkpoint. The command exits with 1."""


def described(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    first = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
