"""Signals that ask a process to end: SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal was closed).

A command that is ended by a signal exits with 128 plus the signal's number, as is usual in shells: 130, 143 and 129.
So `a && b` does not start b after unfinished work, even if that work was saved.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Interrupted(KeyboardInterrupt):
    """Raised for SIGTERM and SIGHUP. As a KeyboardInterrupt, it makes code clean up in the same way as Ctrl-C does."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def signal_number(error: KeyboardInterrupt) -> int:
    """Return the number of the signal that raised an exception."""
    return error.number if isinstance(error, Interrupted) else signal.SIGINT


def interrupt(number: int) -> KeyboardInterrupt:
    """Return the exception for a signal: a plain KeyboardInterrupt for SIGINT, `Interrupted` for any other."""
    return KeyboardInterrupt() if number == signal.SIGINT else Interrupted(number)


def add_remedy(error: KeyboardInterrupt, remedy: str) -> None:
    """Have the message about the interrupt say what continues the work, unless an inner function has said it."""
    if not remedies(error):
        error.add_note(remedy)


def remedies(error: KeyboardInterrupt) -> list[str]:
    """Return what `add_remedy` has added."""
    return list(getattr(error, "__notes__", ()))


def message(error: KeyboardInterrupt) -> str:
    """Return the message about an interrupt, with its remedy."""
    number = signal_number(error)
    by_signal = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return "; ".join([f"interrupted{by_signal}", *remedies(error)])


def exit_code(status: str) -> int:
    """Return the exit code of work that ended with this status: that of a signal such as "SIGINT", else 0."""
    return 128 + signal.Signals[status] if status in signal.Signals.__members__ else 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Exits at once if that has already happened.

    Raises OSError if the kernel refuses.
    """
    import ctypes  # most commands do not need it

    if ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def hold(number: int) -> Iterator[None]:
    """Context manager in which a signal waits in processes that are started, until they call `release`.

    It waits in this process too, until the end of the block, unless another thread takes it.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def release(number: int) -> None:
    """Deliver a signal that waited because this process was started within `hold`, and all later ones."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


@contextlib.contextmanager
def raise_on_termination() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGHUP raise `Interrupted`. Under nohup, SIGHUP stays ignored."""

    def raise_interrupted(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    previous = {}
    if threading.current_thread() is threading.main_thread():  # the only thread that may set handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, raise_interrupted)
    try:
        yield
    finally:
        for number, handler in previous.items():
            # Restore only our own handler: a stopped server sets SIGTERM to be ignored until the process ends.
            if signal.getsignal(number) is raise_interrupted:
                signal.signal(number, handler)


class StopSignal:
    """Context manager in which SIGINT, SIGTERM and SIGHUP only set `requested`.

    The training loop reads it and ends the run at the next step boundary. Once it is set, Ctrl-C ends the run without
    another checkpoint, as soon as one that is being written is complete.
    Under nohup, which ignores SIGHUP, the run continues after its terminal is closed.
    """

    def __init__(self) -> None:
        self.requested: str | None = None  # the signal's name, or the run's own reason to stop
        self._previous: dict[int, object] = {}

    @property
    def number(self) -> int:
        """The signal's number; -1 if the run itself requested the stop, and 0 if no stop was requested."""
        if self.requested is None:
            return 0
        return int(signal.Signals.__members__.get(self.requested, -1))

    def adopt(self, number: int) -> None:
        """Adopt the `number` of another rank if it is a signal's, so that all ranks end with the same exit code."""
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
