"""A sweep of measurements: stored ones are reused, deadlines hold, and points that are too large are inferred."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.measurements.store import Row, open_store, slug
from deskside.probe.grid import Point, needs_at_least_as_much_memory, order
from deskside.probe.sweep import MEASURE_CARD, PointResult, Sweep
from deskside.utils.child_process import ProcessOutcome
from tests.measurements.test_store import MACHINE
from tests.probe import fakes
from tests.probe.test_grid import grid

POINTS = order(grid([4, 8, 10, 12, 16], [512, 2048, 8192], ["muon"], ["none"]))


@dataclass
class World:
    """A clock that only measurements advance, and measurements that only take time on that clock."""

    setup: float = 20.0
    slower: float = 1.0
    now: float = 1000.0
    called: list[dict[str, Any]] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    pending: int | None = None
    ended: int = 0
    interrupt_at: int | None = None
    fail: bool = False

    def run(self, target: str, arguments: Mapping[str, Any], timeout: float) -> ProcessOutcome:
        self.begun.append(self.now)
        if target == MEASURE_CARD:
            return self._answer(fakes.measure_card(arguments["device"]), 15.0, timeout)
        self.called.append(dict(arguments["spec"]))
        if len(self.called) == self.interrupt_at:
            raise KeyboardInterrupt
        if self.fail:
            return ProcessOutcome("failed", None, "RuntimeError: illegal access", 3.0)
        try:
            result = fakes.answer(arguments["spec"])
        except MemoryError as error:
            self.now += 6.0
            return ProcessOutcome("oom", None, str(error), 6.0)
        step = self.slower * result["step_seconds"]["median"]
        return self._answer(result, self.setup + max(2.0, 2 * step) + max(4.0, 5 * step) + 2 * step, timeout)

    def _answer(self, result: dict[str, Any], seconds: float, timeout: float) -> ProcessOutcome:
        self.now += min(seconds, timeout)
        if seconds > timeout:
            return ProcessOutcome("timeout", None, f"no answer within {timeout:.0f} s", timeout)
        return ProcessOutcome("ok", result, "", seconds)

    # SweepListener
    def start(self, pending: int) -> None:
        self.pending = pending

    def begin(self, title: str, seconds: float) -> None: ...
    def end(self, point_result: PointResult) -> None:
        self.ended += 1

    def card(self, row: Row) -> None: ...


def make_sweep(folder: str | Path, world: World, seconds: float | None = None, again: bool = False) -> Sweep:
    deadline = None if seconds is None else world.now + seconds
    return Sweep(open_store(folder), MACHINE, world, deadline, again, run=world.run, clock=lambda: world.now)


def by_status(point_results: list[PointResult], status: str) -> list[Point]:
    return [point_result.point for point_result in point_results if point_result.status == status]


def test_everything_is_measured_or_concluded(tmp_path: Path) -> None:
    world = World()
    result = make_sweep(tmp_path, world).measure(POINTS)
    assert result.card is not None and result.card["result"]["matmul_peak"] == 2e13
    assert {id(f.point) for f in result.point_results} == {id(p) for p in POINTS}
    assert len(result.point_results) == len(POINTS)
    full, skipped = by_status(result.point_results, "oom"), by_status(result.point_results, "skipped")
    assert full and skipped
    for point in skipped:  # what was inferred is true: the fake GPU has no room for it either
        assert any(needs_at_least_as_much_memory(point, other) for other in full)
        with pytest.raises(MemoryError):
            fakes.answer(dict(point.spec))
    assert len(world.called) == len(POINTS) - len(skipped)
    assert {spec["device"] for spec in world.called} == {"cuda"}


def test_the_listener_counts_the_points_that_are_not_stored(tmp_path: Path) -> None:
    make_sweep(tmp_path, World()).measure(POINTS[:2])
    world = World()
    make_sweep(tmp_path, world).measure(POINTS)
    assert world.pending == world.ended == len(POINTS) - 2


def test_what_is_stored_is_not_measured_again(tmp_path: Path) -> None:
    make_sweep(tmp_path, World()).measure(POINTS)
    before = open_store(tmp_path).path(MACHINE.card).read_bytes()
    world = World()
    result = make_sweep(tmp_path, world).measure(POINTS)
    assert world.called == [] and world.begun == []
    assert {f.origin for f in result.point_results} == {"stored", "concluded"}
    assert result.card is not None
    assert open_store(tmp_path).path(MACHINE.card).read_bytes() == before
    world = World()
    make_sweep(tmp_path, world, again=True).measure(POINTS[:1])
    assert len(world.called) == 1 and len(world.begun) == 2


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    world = World(interrupt_at=4)
    result = make_sweep(tmp_path, world).measure(POINTS)
    assert result.interrupted
    measured = [f for f in result.point_results if f.origin == "measured"]
    assert len(measured) == 3
    assert len(result.point_results) == len(POINTS)
    again = World()
    rest = make_sweep(tmp_path, again).measure(POINTS)
    assert not rest.interrupted
    assert not {repr(s["model"]) + str(s["sequence_length"]) for s in again.called} & {
        repr(f.point.spec["model"]) + str(f.point.sequence_length) for f in measured
    }


def test_an_interrupted_repetition_goes_on(tmp_path: Path) -> None:
    """What was measured again before the interruption is kept; after the last point, all are measured again."""
    points = [point for point in POINTS if point.sequence_length == 512]
    make_sweep(tmp_path, World()).measure(points)
    first = make_sweep(tmp_path, World(interrupt_at=3), again=True).measure(points)
    assert first.interrupted and [f.origin for f in first.point_results].count("measured") == 2
    # The time limit ends it too: it has room for the next point only.
    world = World()
    second = make_sweep(tmp_path, world, seconds=50.0, again=True).measure(points)
    assert [f.origin for f in second.point_results[:2]] == ["stored", "stored"]
    third_world = World()
    third = make_sweep(tmp_path, third_world, again=True).measure(points)
    assert world.called and third_world.called
    assert len(world.called) + len(third_world.called) == len(points) - 2
    assert len(third_world.begun) == len(third_world.called)  # the card was measured again by the first
    assert "no time" not in {f.status for f in third.point_results}
    anew = World()
    make_sweep(tmp_path, anew, again=True).measure(points)
    assert len(anew.called) == len(points) and len(anew.begun) == len(points) + 1


def test_a_repetition_of_other_points_begins_anew(tmp_path: Path) -> None:
    make_sweep(tmp_path, World(interrupt_at=3), again=True).measure(POINTS)
    world = World()
    make_sweep(tmp_path, world, again=True).measure(POINTS[:1])
    assert len(world.called) == 1
    (tmp_path / f".{slug(MACHINE.card)}.again.json").write_text("{")  # damaged
    world = World()
    make_sweep(tmp_path, world, again=True).measure(POINTS[:2])
    assert len(world.called) == 2


def test_failures_are_kept_and_tried_again(tmp_path: Path) -> None:
    result = make_sweep(tmp_path, World(fail=True)).measure(POINTS[:2])
    assert {f.status for f in result.point_results} == {"failed"}
    assert result.point_results[0].row is not None
    assert result.point_results[0].row["error"] == "RuntimeError: illegal access"
    world = World()
    result = make_sweep(tmp_path, world).measure(POINTS[:1])
    assert len(world.called) == 1 and result.point_results[0].status == "ok"


@settings(deadline=None, max_examples=60)
@given(st.floats(0.1, 600), st.floats(0, 60), st.floats(0.05, 200), st.permutations(POINTS), st.booleans())
def test_deadlines_hold(
    seconds: float, setup: float, slower: float, points: list[Point], known: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if known:
            make_sweep(folder, World(setup, slower)).measure(points[:2])
        world = World(setup, slower)
        began = world.now
        result = make_sweep(folder, world, seconds).measure(points)
        # an out-of-memory error of the fake GPU takes its 6 s
        assert world.now <= began + seconds + 1e-6 + 6.0
        assert all(start <= began + seconds for start in world.begun)
        assert len(result.point_results) == len(points)
        assert not any(f.status == "timeout" for f in result.point_results), (
            "the deadline is no property of a point"
        )
        # A point without time left was estimated to end too late, or was cut off.
        stored = {
            row["hash"] for row in open_store(folder).rows(MACHINE, "point") if row["status"] != "skipped"
        }
        measured = [
            f.row["hash"] for f in result.point_results if f.row is not None and f.status != "skipped"
        ]
        assert set(measured) <= stored and len(measured) == len(set(measured))


def test_a_point_that_would_end_too_late_is_not_begun(tmp_path: Path) -> None:
    world = World()
    result = make_sweep(tmp_path, world, 15 + 30 + 28 * 2 + 5).measure(POINTS)
    assert by_status(result.point_results, "ok") and by_status(result.point_results, "no time")
    assert world.now <= 1000 + 15 + 30 + 28 * 2 + 5
    assert len(open_store(tmp_path).rows(MACHINE, "point")) < len(POINTS)


def test_a_point_that_never_ends_is_given_up(tmp_path: Path) -> None:
    world = World(slower=1e6)
    result = make_sweep(tmp_path, world).measure(POINTS[:1])
    assert result.point_results[0].status == "timeout"
    assert world.now < 1000 + 900
    assert len(open_store(tmp_path).rows(MACHINE, "point")) == 1
