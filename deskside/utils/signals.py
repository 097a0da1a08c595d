"""Signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal was closed).

A command that one of them ends exits with 128 plus the signal's number, as a shell reports it: 130, 143 and 129. So
`a && b` does not go on with unfinished work, whether or not it was saved.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised where Ctrl-C would raise a KeyboardInterrupt, so that both clean up alike."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def number_of(error: KeyboardInterrupt) -> int:
    """Return the number of the signal that an exception stands for."""
    return error.number if isinstance(error, Interrupted) else signal.SIGINT


def exit_code(name: str) -> int:
    """Return the exit code of a command that the signal `name`, such as "SIGINT", ended."""
    return 128 + signal.Signals[name]


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP raise `Interrupted`. An ignored SIGHUP stays ignored, as nohup wants it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
