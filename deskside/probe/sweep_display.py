"""Progress of a sweep on standard error: a progress bar in a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deskside.measurements.store import Row
from deskside.probe import table
from deskside.probe.sweep import PointResult, SweepListener
from deskside.utils.console import say, terminal_width, wrap
from deskside.utils.printer import is_interactive, make_console
from deskside.utils.progress import times


@contextmanager
def progress_listener() -> Iterator[SweepListener]:
    """Yield a listener that shows the current measurement, its estimated time and its result."""
    console = make_console(stderr=True)
    if not is_interactive(console):
        yield Lines()
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        yield Bar(bar)


class Lines:
    """Prints a line when a measurement starts and one when it ends, with the elapsed time and what is left."""

    def start(self, pending: int) -> None:
        self._points, self._done = pending, 0
        self._began = time.monotonic()

    def begin(self, title: str, seconds: float) -> None:
        say(f"{title}: about {seconds:.0f} s")

    def end(self, point_result: PointResult) -> None:
        self._done += 1
        seconds = time.monotonic() - self._began
        left = seconds / self._done * (self._points - self._done)
        say(f"{self._done} of {self._points}: {point_line(point_result)}; {times(seconds, left)}")

    def card(self, row: Row) -> None:
        say(card_line(row))


class Bar:
    """Shows the current measurement beside a progress bar, and results above it."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def start(self, pending: int) -> None:
        self._task = self._bar.add_task("probe", total=pending)

    def begin(self, title: str, seconds: float) -> None:
        self._bar.update(self._task, description=f"{title} (about {seconds:.0f} s)")

    def end(self, point_result: PointResult) -> None:
        self._print(point_line(point_result))
        self._bar.advance(self._task)

    def card(self, row: Row) -> None:
        self._print(card_line(row))

    def _print(self, text: str) -> None:
        for line in wrap(text, terminal_width()):
            self._bar.console.print(line, markup=False, soft_wrap=True)


def point_line(point_result: PointResult) -> str:
    """Return the result of a point as one line."""
    title, row = point_result.point.title(), point_result.row
    if row is None:
        return f"{title}: ended, the time is up"
    if row["status"] != "ok":
        return f"{title}: {row['status']}: {row['error']}"
    result = row["result"]
    return (
        f"{title}: {result['tokens_per_second']:,.0f} tokens/s, {table.memory(result)} GiB, "
        f"measured in {row['seconds']:.0f} s"
    )


def card_line(row: Row) -> str:
    """Return the result of the device benchmark as one line."""
    if row["status"] != "ok":
        return f"device benchmark: {row['status']}: {row['error']}"
    result = row["result"]
    return (
        f"device benchmark: {result['matmul_peak'] / 1e12:,.2f} TFLOP/s in matmuls, "
        f"{result['copy_bandwidth'] / 1e9:,.0f} GB/s in copies, measured in {row['seconds']:.0f} s"
    )
