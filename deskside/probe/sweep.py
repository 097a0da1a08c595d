"""Measuring points one at a time, each in a process of its own, until all are done or the time is up.

Every result is in the store before the next point begins, so whatever ends a survey, what was measured stays measured,
and the same survey goes on where it was. A point is not begun when it would probably end after the deadline, and ended
when it does; that says nothing about the point, so nothing is stored of it.
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
MEASURE_CARD = "deskside.probe.card:measure_card"
POINT_LIMIT, CARD_LIMIT = 600.0, 180.0  # seconds after which a measurement without a deadline is given up
SHORTEST = 2.0  # seconds in which nothing can be measured

Origin = Literal["measured", "stored", "concluded", "no time"]


@dataclass(frozen=True)
class Finding:
    """What is known of a point: its row, and whether it was measured now, stored before, or concluded.

    row is None for a point that there was no time for.
    """

    point: Point
    row: Row | None
    origin: Origin

    @property
    def status(self) -> str:
        return "no time" if self.row is None else str(self.row["status"])


class Watcher(Protocol):
    """Is told what happens. seconds: how long the next measurement will probably take."""

    def begin(self, title: str, seconds: float) -> None: ...
    def end(self, finding: Finding) -> None: ...
    def card(self, row: Row) -> None: ...


@dataclass
class Survey:
    """Findings in the order in which they came; those that were stored before come first."""

    card: Row | None = None
    findings: list[Finding] = field(default_factory=list)
    interrupted: int = 0  # the number of the signal that ended it early

    def rows(self) -> list[tuple[Point, Row]]:
        return [(finding.point, finding.row) for finding in self.findings if finding.row is not None]


@dataclass
class Surveyor:
    """Where results go, how long it may take, and who is told.

    deadline: of `clock`, in seconds, None without one; again: measure what is stored too; run: how a target is called
    in a process of its own, as `child_process.run`.
    """

    store: Store
    machine: Machine
    watcher: Watcher
    deadline: float | None = None
    again: bool = False
    point_target: str = MEASURE_POINT
    card_target: str = MEASURE_CARD
    run: Callable[..., child_process.Outcome] = child_process.run
    clock: Callable[[], float] = time.monotonic

    def survey(self, points: Sequence[Point]) -> Survey:
        """Measure the card, then the points in this order, as far as the time goes.

        KeyboardInterrupt ends it and is no error: the survey says that it was interrupted. Raises RunError when a
        result cannot be stored, UsageError when the store cannot be read or written, Busy when there is something to
        measure and another process is measuring.
        """
        done, pending, _ = self._known(points)
        if done.card is not None and not pending:
            return done
        with self.store.measuring(self.machine.card):
            # Read again: what another process measured until now need not be measured.
            return self._rest(points, *self._known(points))

    def _known(self, points: Sequence[Point]) -> tuple[Survey, list[Point], dict[str, Row]]:
        """What is stored already, the points that are left, and all rows by their hash."""
        stored = {} if self.again else {row["hash"]: row for row in self.store.rows(self.machine)}
        done = Survey()
        card = stored.get(hash_of(make_key(self.machine, {})))
        if card is not None and card["kind"] == "card" and card["status"] == "ok":
            done.card = card
        pending: list[Point] = []
        for point in points:
            row = stored.get(hash_of(self._key(point)))
            if row is not None and row["kind"] == "point" and row["status"] in FINAL:
                done.findings.append(Finding(point, row, "stored"))
            else:
                pending.append(point)
        return done, pending, stored

    def _rest(
        self, points: Sequence[Point], done: Survey, pending: list[Point], stored: Mapping[str, Row]
    ) -> Survey:
        """Measure what is left."""
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
            done.interrupted = signals.number_of(error)
        known = {id(finding.point) for finding in done.findings}
        done.findings += [Finding(point, None, "no time") for point in points if id(point) not in known]
        return done

    def _card(self) -> Row | None:
        """Measure the card itself, if there is time."""
        expected = CARD_SECONDS[self.machine.device]
        if self._left() < expected:
            return None
        self.watcher.begin("the card itself", expected)
        outcome = self.run(self.card_target, {"device": self.machine.device}, min(CARD_LIMIT, self._left()))
        if outcome.status == "timeout" and self._left() < SHORTEST:
            return None
        key = make_key(self.machine, {})
        row = make_row("card", key, outcome.status, outcome.value, outcome.error, outcome.seconds)
        self.store.add(row)
        self.watcher.card(row)
        return row

    def _next(self, pending: list[Point], done: Survey) -> Point | None:
        """The first point that there is time for."""
        left = self._left()
        if left < SHORTEST:
            return None
        return next((point for point in pending if self._expected(point, done) <= left), None)

    def _without_too_large(
        self,
        pending: list[Point],
        done: Survey,
        rows: Sequence[tuple[Point, Row]],
        stored: Mapping[str, Row],
    ) -> list[Point]:
        """The points left to be tried: one that needs more memory than one that had too little is not."""
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
            done.findings.append(Finding(point, row, "concluded"))
            self.watcher.end(done.findings[-1])
        return left

    def _measure(self, point: Point, done: Survey) -> Finding:
        device = self.machine.device
        self.watcher.begin(point.title(), self._expected(point, done))
        spec = {
            **point.spec,
            "device": device,
            "warmup_seconds": WARMUP_SECONDS[device],
            "seconds": COUNTED_SECONDS[device],
        }
        outcome = self.run(self.point_target, {"spec": spec}, min(POINT_LIMIT, self._left()))
        if outcome.status == "timeout" and self._left() < SHORTEST:
            return Finding(point, None, "no time")
        key = self._key(point)
        row = make_row("point", key, outcome.status, outcome.value, outcome.error, outcome.seconds)
        self.store.add(row)
        return Finding(point, row, "measured")

    def _expected(self, point: Point, done: Survey) -> float:
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
