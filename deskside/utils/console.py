"""Messages on standard error."""

import sys


def say(text: str) -> None:
    """Print a line on standard error, because standard output is for results only."""
    print(text, file=sys.stderr, flush=True)
