"""Progress on standard error: a bar with the remaining time on a terminal, else a line each minute and at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import TracebackType

from deskside.utils.console import say
from deskside.utils.format import elapsed

LINE_SECONDS = 60.0  # between the lines of every command where there is no terminal
MIN_ELAPSED_SECONDS = 2.0  # before `time_limit` estimates the end of a task

_limit: ContextVar[tuple[float, Callable[[float], Exception]] | None] = ContextVar("limit", default=None)


@contextlib.contextmanager
def time_limit(seconds: float, error: Callable[[float], Exception]) -> Iterator[None]:
    """Context manager in which `ProgressBar.advance` raises an exception if its task will not finish in time.

    seconds: the limit, from now on. error: returns the exception, given the estimated remaining seconds.
    """
    token = _limit.set((time.monotonic() + seconds, error))
    try:
        yield
    finally:
        _limit.reset(token)


def times(seconds: float, left: float | None = None) -> str:
    """Return the elapsed seconds and those left, if they are known, as text."""
    text = f"{elapsed(round(seconds, 1))} elapsed"
    return text if left is None else f"{text}, about {elapsed(round(left, 1))} left"


class ProgressBar:
    """Context manager that shows the progress of a task, counted in `unit`. Nothing is printed with `quiet`.

        with ProgressBar("tokenize", total=100, unit="MB") as bar:
            bar.advance(5)

    total: None if it is not known; then no remaining time is shown.
    """

    def __init__(self, task: str, total: float | None, unit: str, *, quiet: bool = False) -> None:
        self._task, self._total, self._unit = task, total, unit
        self._quiet = quiet
        self._completed = 0.0
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if quiet:
            return
        from deskside.utils.printer import is_interactive, make_console  # import rich, which takes time

        console = make_console(stderr=True)
        if is_interactive(console):
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn(
                    "{task.completed:,.0f} of {task.total:,.0f} " + unit
                    if total
                    else "{task.completed:,.0f} " + unit
                ),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._id = self._bar.add_task(task, total=total)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._print_line()

    def advance(self, amount: float) -> None:
        """Add completed work. Raises the error of `time_limit` if the task is estimated to end too late."""
        self._completed += amount
        self._check_time_limit()
        if self._bar is not None:
            self._bar.update(self._id, completed=self._completed)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._print_line()

    def _check_time_limit(self) -> None:
        limit = _limit.get()
        now = time.monotonic()
        if limit is None or not self._total or not self._completed or now - self._start < MIN_ELAPSED_SECONDS:
            return
        remaining = (now - self._start) * (self._total / self._completed - 1)
        deadline, error = limit
        if now + remaining > deadline:
            raise error(remaining)

    def _print_line(self) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        seconds = now - self._start
        self._last_line = now
        number_format = ",.1f" if self._unit == "MB" else ",.0f"
        text = f"{self._task}: {self._completed:{number_format}}"
        if self._total:
            text += f" of {self._total:{number_format}}"
        left = None
        if self._total and 0 < self._completed < self._total:
            left = seconds * (self._total / self._completed - 1)
        say(f"{text} {self._unit}, {times(seconds, left)}")
