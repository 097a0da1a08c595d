"""The two errors that a person may see. Everything else is a bug and may show a traceback under --debug."""


class UsageError(Exception):
    """Wrong input: one line that says what to do about it. The command line exits with 2."""


class RunError(Exception):
    """The work itself failed (disk full, training diverged, damaged checkpoint). The command line exits with 1."""
