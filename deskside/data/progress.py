"""Progress on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """One task at a time, counted in `unit`. With `quiet` nothing is printed.

    with Progress("tokenise", total=100, unit="MB") as bar:
        bar.advance(5)
    """

    def __init__(self, task: str, total: float | None, unit: str, *, quiet: bool = False) -> None:
        self._task, self._total, self._unit = task, total, unit
        self._quiet = quiet
        self._done = 0.0
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
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
                console=Console(stderr=True),
            )
            self._id = self._bar.add_task(task, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._line()

    def advance(self, amount: float) -> None:
        self._done += amount
        if self._bar is not None:
            self._bar.update(self._id, completed=self._done)
        elif time.monotonic() - self._last_line > 5:
            self._line()

    def _line(self) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        seconds = now - self._start
        self._last_line = now
        text = f"{self._task}: {self._done:,.1f}"
        if self._total:
            text += f" of {self._total:,.1f}"
        text += f" {self._unit}, {seconds:.0f} s"
        if self._total and 0 < self._done < self._total:
            text += f", about {seconds * (self._total / self._done - 1):.0f} s left"
        print(text, file=sys.stderr, flush=True)
