"""Signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal was closed).

A command that a signal ends exits with 128 plus the signal's number, as a shell reports it: 130, 143 and 129. So
`a && b` does not start b after unfinished work, whether or not that work was saved.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised like the KeyboardInterrupt of Ctrl-C, so that all three clean up in the same way."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def number_of(error: KeyboardInterrupt) -> int:
    """Return the number of the signal that raised an exception."""
    return error.number if isinstance(error, Interrupted) else signal.SIGINT


def exit_code(name: str) -> int:
    """Return the exit code of a command that was ended by the signal `name`, such as "SIGINT"."""
    return 128 + signal.Signals[name]


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGHUP raise `Interrupted`. A SIGHUP that nohup ignores stays ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            # The server ignores SIGTERM once it has stopped, until the process ends.
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


class StopSignal:
    """While entered, the first SIGINT, SIGTERM or SIGHUP only sets `requested`: the run ends at the next step boundary.

    A second Ctrl-C ends it at once. Under nohup, which has SIGHUP ignored, the run goes on without its terminal.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, object] = {}

    @property
    def number(self) -> int:
        """The signal's number; -1 where the run itself asked for the stop, 0 where nothing did."""
        if self.requested is None:
            return 0
        return int(signal.Signals.__members__.get(self.requested, -1))

    def adopt(self, number: int) -> None:
        """Take over the signal that another process got, so that all processes end with the same exit code."""
        if number > 0:
            self.requested = signal.Signals(number).name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
