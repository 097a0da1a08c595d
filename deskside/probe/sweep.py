"""Measure points one at a time, each in its own process, until all are done or the time is up.

Every result is stored before the next point starts, so an interrupted sweep continues where it stopped. A point is not
started if it would probably end after the deadline, and is killed at the deadline. That says nothing about the point,
so nothing is stored for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deskside.measurements.identity import Machine
from deskside.measurements.store import FINAL, Row, Store, hash_of, make_key, make_row
from deskside.probe.grid import (
    CARD_SECONDS,
    COUNTED_SECONDS,
    WARMUP_SECONDS,
    Point,
    estimate_seconds,
    needs_more_memory,
)
from deskside.utils import child_process, signals

MEASURE_POINT = "deskside.probe.point:measure_point"
MEASURE_CARD = "deskside.probe.card_benchmark:measure_card"
POINT_LIMIT, CARD_LIMIT = 600.0, 180.0  # time limit of a measurement in seconds
MIN_SECONDS = 2.0  # nothing can be measured in less

Origin = Literal["measured", "stored", "concluded", "no time"]


@dataclass(frozen=True)
class ProbeResult:
    """Result of a point: its row, and whether it was measured now, stored before, or concluded from other points.

    `row` is None if there was no time to measure the point.
    """

    point: Point
    row: Row | None
    origin: Origin

    @property
    def status(self) -> str:
        return "no time" if self.row is None else str(self.row["status"])


class SweepListener(Protocol):
    """Receives the progress of a sweep. `seconds` is the estimated time of the next measurement."""

    def begin(self, title: str, seconds: float) -> None: ...
    def end(self, finding: ProbeResult) -> None: ...
    def card(self, row: Row) -> None: ...


@dataclass
class SweepResult:
    """Results in the order of measurement, after those that were stored before."""

    card: Row | None = None
    findings: list[ProbeResult] = field(default_factory=list)
    interrupted: int = 0  # the number of the signal that ended it early

    def rows(self) -> list[tuple[Point, Row]]:
        return [(finding.point, finding.row) for finding in self.findings if finding.row is not None]


@dataclass
class Sweep:
    """Measures points and stores their results.

    Attributes:
        store: Where results are stored.
        machine: The machine that is measured.
        watcher: Receives the progress.
        deadline: Time of `clock` in seconds, None without a limit.
        again: Whether stored points are measured again.
        point_target: Function that measures a point, called in a child process.
        card_target: Function that measures the GPU itself.
        run: Calls a target in a child process, like `child_process.run`.
        clock: Current time in seconds.
    """

    store: Store
    machine: Machine
    watcher: SweepListener
    deadline: float | None = None
    again: bool = False
    point_target: str = MEASURE_POINT
    card_target: str = MEASURE_CARD
    run: Callable[..., child_process.Outcome] = child_process.run
    clock: Callable[[], float] = time.monotonic

    def measure(self, points: Sequence[Point]) -> SweepResult:
        """Measure the GPU, then the points in this order, until the deadline.

        KeyboardInterrupt ends the sweep, and the result says so. Raises RunError if a result cannot be stored,
        UsageError if the store cannot be read or written, and Busy if another process is measuring.
        """
        done, pending, _ = self._known(points)
        if done.card is not None and not pending:
            return done
        with self.store.measuring(self.machine.card):
            # Read the store again: another process may have measured some points meanwhile.
            return self._rest(points, *self._known(points))

    def _known(self, points: Sequence[Point]) -> tuple[SweepResult, list[Point], dict[str, Row]]:
        """Return the stored results, the remaining points, and all rows by their hash."""
        stored = {} if self.again else {row["hash"]: row for row in self.store.rows(self.machine)}
        done = SweepResult()
        card = stored.get(hash_of(make_key(self.machine, {})))
        if card is not None and card["kind"] == "card" and card["status"] == "ok":
            done.card = card
        pending: list[Point] = []
        for point in points:
            row = stored.get(hash_of(self._key(point)))
            if row is not None and row["kind"] == "point" and row["status"] in FINAL:
                done.findings.append(ProbeResult(point, row, "stored"))
            else:
                pending.append(point)
        return done, pending, stored

    def _rest(
        self, points: Sequence[Point], done: SweepResult, pending: list[Point], stored: Mapping[str, Row]
    ) -> SweepResult:
        """Measure the remaining points."""
        try:
            done.card = done.card or self._card()
            pending = self._without_too_large(pending, done, done.rows(), stored)
            while (chosen := self._next(pending, done)) is not None:
                pending.remove(chosen)
                finding = self._measure(chosen, done)
                done.findings.append(finding)
                self.watcher.end(finding)
                if finding.row is not None:
                    pending = self._without_too_large(pending, done, [(chosen, finding.row)], stored)
        except KeyboardInterrupt as error:
            done.interrupted = signals.signal_number(error)
        known = {id(finding.point) for finding in done.findings}
        done.findings += [ProbeResult(point, None, "no time") for point in points if id(point) not in known]
        return done

    def _card(self) -> Row | None:
        """Run the GPU benchmark, if there is time."""
        expected = CARD_SECONDS[self.machine.device]
        if self._left() < expected:
            return None
        self.watcher.begin("the card itself", expected)
        outcome = self.run(self.card_target, {"device": self.machine.device}, min(CARD_LIMIT, self._left()))
        if outcome.status == "timeout" and self._left() < MIN_SECONDS:
            return None
        key = make_key(self.machine, {})
        row = make_row("card", key, outcome.status, outcome.value, outcome.error, outcome.seconds)
        self.store.add(row)
        self.watcher.card(row)
        return row

    def _next(self, pending: list[Point], done: SweepResult) -> Point | None:
        """Return the first point that fits in the remaining time."""
        left = self._left()
        if left < MIN_SECONDS:
            return None
        return next((point for point in pending if self._expected(point, done) <= left), None)

    def _without_too_large(
        self,
        pending: list[Point],
        done: SweepResult,
        rows: Sequence[tuple[Point, Row]],
        stored: Mapping[str, Row],
    ) -> list[Point]:
        """Drop points that need more memory than one that ran out of it, and record them as skipped."""
        left: list[Point] = []
        full = [point for point, row in rows if row["status"] == "oom"]
        for point in pending:
            smaller = next((other for other in full if needs_more_memory(point, other)), None)
            if smaller is None:
                left.append(point)
                continue
            reason = f"needs more memory than {smaller.title()}, which was out of memory"
            row = make_row("point", self._key(point), "skipped", None, reason)
            known = stored.get(row["hash"])
            if known is None or (known["status"], known["error"]) != ("skipped", reason):
                self.store.add(row)
            done.findings.append(ProbeResult(point, row, "concluded"))
            self.watcher.end(done.findings[-1])
        return left

    def _measure(self, point: Point, done: SweepResult) -> ProbeResult:
        device = self.machine.device
        self.watcher.begin(point.title(), self._expected(point, done))
        spec = {
            **point.spec,
            "device": device,
            "warmup_seconds": WARMUP_SECONDS[device],
            "seconds": COUNTED_SECONDS[device],
        }
        outcome = self.run(self.point_target, {"spec": spec}, min(POINT_LIMIT, self._left()))
        if outcome.status == "timeout" and self._left() < MIN_SECONDS:
            return ProbeResult(point, None, "no time")
        key = self._key(point)
        row = make_row("point", key, outcome.status, outcome.value, outcome.error, outcome.seconds)
        self.store.add(row)
        return ProbeResult(point, row, "measured")

    def _expected(self, point: Point, done: SweepResult) -> float:
        measured = [
            (other, float(row["result"]["step_seconds"]["median"]), float(row["seconds"]))
            for other, row in done.rows()
            if row["status"] == "ok"
        ]
        peak = done.card["result"].get("matmul_peak") if done.card else None
        return estimate_seconds(point, measured, self.machine.device, peak)

    def _left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - self.clock()

    def _key(self, point: Point) -> dict[str, object]:
        return make_key(self.machine, point.spec)
