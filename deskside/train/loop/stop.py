"""Ctrl-C, SIGTERM and a lost terminal (SIGHUP) end a run at the next step boundary, with everything saved.

A second Ctrl-C ends it at once. Under nohup, which has SIGHUP ignored, the run goes on without its terminal.
"""

import signal
from types import FrameType, TracebackType


class StopSignal:
    """While entered, the first SIGINT, SIGTERM or SIGHUP only sets `requested`."""

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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
