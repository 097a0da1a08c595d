"""The two errors that a person may see. Everything else is a bug and may show a traceback under --debug."""


class UsageError(Exception):
    """Wrong input: one line that says what to do about it. The command line exits with 2."""


class RunError(Exception):
    """The work itself failed (disk full, training diverged, damaged checkpoint). The command line exits with 1."""


def described(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, for a message of one line."""
    first = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
