"""Measure points one at a time, each in its own process, until all are done or the time is up.

Every result is stored before the next point starts, so an interrupted sweep continues where it stopped. A point that
would probably end after the deadline is not started. One that still runs at the deadline is killed, and nothing is
stored for it. A sweep that measures stored points again continues in the same way (`repetition.py`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deskside.measurements.store import FINAL, Row, Store, hash_of, make_key, make_row
from deskside.probe.grid import (
    BENCHMARK_SECONDS,
    COUNTED_SECONDS,
    WARMUP_SECONDS,
    Point,
    estimate_seconds,
    needs_at_least_as_much_memory,
)
from deskside.probe.repetition import Repetition
from deskside.utils import child_process, signals
from deskside.utils.machine import Machine

MEASURE_POINT = "deskside.probe.point:measure_point"
MEASURE_CARD = "deskside.probe.card_benchmark:measure_card"
POINT_TIMEOUT, CARD_TIMEOUT = 600.0, 180.0  # seconds
MIN_SECONDS = 2.0  # no measurement takes less

Origin = Literal["measured", "stored", "concluded", "no time"]


@dataclass(frozen=True)
class PointResult:
    """Result of a point: its row, and its origin: measured now, stored before, or concluded from other points.

    `row` is None, and the origin "no time", if the sweep ended before the point was measured.
    """

    point: Point
    row: Row | None
    origin: Origin

    @property
    def status(self) -> str:
        return "no time" if self.row is None else str(self.row["status"])


class SweepListener(Protocol):
    """Receives the progress of a sweep. `seconds` is the estimated time of the next measurement.

    pending: number of the points that are not stored yet; each of them that gets a result is passed to `end`.
    """

    def start(self, pending: int) -> None: ...
    def begin(self, title: str, seconds: float) -> None: ...
    def end(self, point_result: PointResult) -> None: ...
    def card(self, row: Row) -> None: ...


@dataclass
class SweepResult:
    """Results of a sweep: those stored before, then new ones in the order of measurement, then points without one.

    card: row of the device benchmark, None if it did not run.
    """

    card: Row | None = None
    point_results: list[PointResult] = field(default_factory=list)
    interrupted: int = 0  # number of the signal that ended the sweep early, 0 without one

    def rows(self) -> list[tuple[Point, Row]]:
        return [
            (point_result.point, point_result.row)
            for point_result in self.point_results
            if point_result.row is not None
        ]


@dataclass
class Sweep:
    """Measures points and stores their results.

    Attributes:
        store: Where results are stored.
        machine: The machine that is measured.
        listener: Receives the progress.
        deadline: Value of `clock` at which the sweep ends, in seconds; None without a limit.
        again: Measure stored points again, but not those that an interrupted sweep has measured again.
        point_target: Function that measures a point, called in a child process.
        card_target: Function that benchmarks the device itself.
        run: Calls a target in a child process, like `child_process.run`.
        clock: Current time in seconds.
    """

    store: Store
    machine: Machine
    listener: SweepListener
    deadline: float | None = None
    again: bool = False
    point_target: str = MEASURE_POINT
    card_target: str = MEASURE_CARD
    run: Callable[..., child_process.ProcessOutcome] = child_process.run
    clock: Callable[[], float] = time.monotonic
    _repetition: Repetition | None = field(default=None, init=False)

    def measure(self, points: Sequence[Point]) -> SweepResult:
        """Benchmark the device, then measure the points in order, skipping those that would not end by the deadline.

        KeyboardInterrupt ends the sweep, and the result says so. Raises UsageError if the store cannot be read and
        written at the start, RunError if a later write fails, and Busy if another process is measuring.
        """
        if not self.again:
            result, pending, _ = self._split_stored(points, None)
            if result.card is not None and not pending:
                return result
        with self.store.measuring(self.machine.card):
            repetition = self._repetition = self._open_repetition(points)
            # Read the store again: another process may have measured some points meanwhile.
            result = self._measure_all(points, *self._split_stored(points, repetition))
            complete = result.card is not None and all(each.row is not None for each in result.point_results)
            if repetition is not None and complete and not result.interrupted:
                repetition.finish()
            return result

    def _open_repetition(self, points: Sequence[Point]) -> Repetition | None:
        if not self.again:
            return None
        hashes = [self._card_hash, *(hash_of(self._key(point)) for point in points)]
        return Repetition.open(self.store, self.machine.card, hashes)

    def _split_stored(
        self, points: Sequence[Point], repetition: Repetition | None
    ) -> tuple[SweepResult, list[Point], dict[str, Row]]:
        """Return the stored results, the remaining points, and the stored rows by their hash.

        With a repetition, only what it has measured counts as stored.
        """
        rows = self.store.rows(self.machine)
        stored = {
            row["hash"]: row for row in rows if repetition is None or row["hash"] in repetition.measured
        }
        result = SweepResult()
        card = stored.get(self._card_hash)
        if card is not None and card["kind"] == "card" and card["status"] == "ok":
            result.card = card
        pending: list[Point] = []
        for point in points:
            row = stored.get(hash_of(self._key(point)))
            if row is not None and row["kind"] == "point" and row["status"] in FINAL:
                result.point_results.append(PointResult(point, row, "stored"))
            else:
                pending.append(point)
        return result, pending, stored

    def _measure_all(
        self, points: Sequence[Point], result: SweepResult, pending: list[Point], stored: Mapping[str, Row]
    ) -> SweepResult:
        """Measure the pending points and add them to the result."""
        self.listener.start(len(pending))
        try:
            result.card = result.card or self._card()
            pending = self._skip_too_large(pending, result, result.rows(), stored)
            while (chosen := self._next(pending, result)) is not None:
                pending.remove(chosen)
                point_result = self._measure(chosen, result)
                result.point_results.append(point_result)
                self.listener.end(point_result)
                if point_result.row is not None:
                    pending = self._skip_too_large(pending, result, [(chosen, point_result.row)], stored)
        except KeyboardInterrupt as error:
            result.interrupted = signals.signal_number(error)
        finished = {id(point_result.point) for point_result in result.point_results}
        result.point_results += [
            PointResult(point, None, "no time") for point in points if id(point) not in finished
        ]
        return result

    def _card(self) -> Row | None:
        """Run the device benchmark and return its row, None if there is no time."""
        expected = BENCHMARK_SECONDS[self.machine.device]
        if self._seconds_left() < expected:
            return None
        self.listener.begin("device benchmark", expected)
        outcome = self.run(
            self.card_target, {"device": self.machine.device}, min(CARD_TIMEOUT, self._seconds_left())
        )
        if outcome.status == "timeout" and self._seconds_left() < MIN_SECONDS:
            return None
        key = make_key(self.machine, {})
        row = make_row("card", key, outcome.status, outcome.value, outcome.error, outcome.seconds)
        self._add(row)
        self.listener.card(row)
        return row

    def _next(self, pending: list[Point], result: SweepResult) -> Point | None:
        """Return the first point that fits in the remaining time, or None."""
        seconds_left = self._seconds_left()
        if seconds_left < MIN_SECONDS:
            return None
        for point in pending:
            if self._estimated_seconds(point, result) <= seconds_left:
                return point
        return None

    def _skip_too_large(
        self,
        pending: list[Point],
        result: SweepResult,
        rows: Sequence[tuple[Point, Row]],
        stored: Mapping[str, Row],
    ) -> list[Point]:
        """Return the points that may fit in memory. Store and report the others as skipped.

        A point is skipped if it needs at least as much memory as one of `rows` that ran out of memory.
        """
        remaining: list[Point] = []
        out_of_memory = [point for point, row in rows if row["status"] == "oom"]
        for point in pending:
            smaller = next(
                (other for other in out_of_memory if needs_at_least_as_much_memory(point, other)), None
            )
            if smaller is None:
                remaining.append(point)
                continue
            reason = f"needs at least as much memory as {smaller.title()}, which ran out of memory"
            row = make_row("point", self._key(point), "skipped", None, reason)
            previous = stored.get(row["hash"])
            if previous is None or (previous["status"], previous["error"]) != ("skipped", reason):
                self.store.add(row)
            result.point_results.append(PointResult(point, row, "concluded"))
            self.listener.end(result.point_results[-1])
        return remaining

    def _measure(self, point: Point, result: SweepResult) -> PointResult:
        device = self.machine.device
        self.listener.begin(point.title(), self._estimated_seconds(point, result))
        spec = {
            **point.spec,
            "device": device,
            "warmup_seconds": WARMUP_SECONDS[device],
            "seconds": COUNTED_SECONDS[device],
        }
        outcome = self.run(self.point_target, {"spec": spec}, min(POINT_TIMEOUT, self._seconds_left()))
        if outcome.status == "timeout" and self._seconds_left() < MIN_SECONDS:
            return PointResult(point, None, "no time")
        key = self._key(point)
        row = make_row("point", key, outcome.status, outcome.value, outcome.error, outcome.seconds)
        self._add(row)
        return PointResult(point, row, "measured")

    def _add(self, row: Row) -> None:
        """Store what was measured."""
        self.store.add(row)
        if self._repetition is not None:
            self._repetition.add(row)

    def _estimated_seconds(self, point: Point, result: SweepResult) -> float:
        measured = [
            (other, float(row["result"]["step_seconds"]["median"]), float(row["seconds"]))
            for other, row in result.rows()
            if row["status"] == "ok"
        ]
        peak = result.card["result"].get("matmul_peak") if result.card else None
        return estimate_seconds(point, measured, self.machine.device, peak)

    def _seconds_left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - self.clock()

    @property
    def _card_hash(self) -> str:
        return hash_of(make_key(self.machine, {}))

    def _key(self, point: Point) -> dict[str, object]:
        return make_key(self.machine, point.spec)
