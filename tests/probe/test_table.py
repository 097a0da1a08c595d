"""The tables fit into 80 columns with the largest numbers, and their numbers are those of the rows."""

import io
from typing import Any

import pytest

from deskside.measurements.store import make_key, make_row
from deskside.probe import table
from deskside.probe.grid import Point, make_point
from deskside.probe.sweep import PointResult
from deskside.utils.printer import Printer
from tests.measurements.test_store import MACHINE
from tests.probe import fakes
from tests.probe.test_grid import depth

SMALL = make_point(depth(8).model, 1024, 8192)


def make_result(point: Point, status: str = "ok", error: str = "", **changes: Any) -> PointResult:
    result = {**fakes.answer(dict(SMALL.spec)), **changes} if status == "ok" else None
    return PointResult(
        point, make_row("point", make_key(MACHINE, point.spec), status, result, error), "measured"
    )


def lines(*point_results: PointResult, width: int = 80) -> list[str]:
    page = io.StringIO()
    table.show(Printer(page, width), point_results)
    return page.getvalue().splitlines()


def test_the_widest_numbers_fit_80_columns() -> None:
    huge = make_point(depth(48).model, 131072, 2**20, "adamw", "bf16", "attention")
    wide = make_result(
        huge,
        tokens_per_second=123_456_789.0,
        micro_tokens=131072,
        accumulation=8,
        step_seconds={"median": 99.9994, "p10": 80.0, "p90": 130.0},
        peak_allocated_bytes=140 * 2**30,
        peak_reserved_bytes=141 * 2**30,
        watts=1000.2,
        mfu=1.0,
    )
    page = lines(
        wide,
        make_result(SMALL),
        make_result(make_point(depth(10).model, 1024, 8192), "skipped", "needs more memory"),
    )
    assert max(map(len, page)) <= 80
    assert not any("…" in line for line in page), page
    assert any("131072x8" in line and "99999" in line and "140/141" in line for line in page)


def test_numbers_are_those_of_the_row() -> None:
    result = {
        "tokens_per_second": 165432.1, "micro_tokens": 8192, "accumulation": 4, "mfu": 0.6249,
        "step_seconds": {"median": 0.198, "p10": 0.194, "p90": 0.202}, "peak_allocated_bytes": 1.5 * 2**30,
        "peak_reserved_bytes": 2 * 2**30, "watts": 449.6,
    }  # fmt: skip
    (line,) = [line for line in lines(make_result(SMALL, **result)) if " ok" in line]
    assert line.split() == [
        "8x512", "4/4", "59.3M", "1024", "8192x4", "165,432", "2%", "198", "62%", "1.5/2.0", "450", "ok",
    ]  # fmt: skip


def test_a_day_and_20_tokens_per_parameter() -> None:
    point_result = make_result(SMALL, tokens_per_second=10_000.0)
    assert point_result.row is not None
    numbers = table.derived(SMALL, point_result.row)
    assert numbers["tokens_per_24h"] == 864e6
    parameters = 8 * (4 * 512**2 + 3 * 512 * 1408 + 2 * 512 + 2 * 128) + 512 + 2 * 32768 * 512
    assert numbers["tokens_for_20_per_parameter"] == 20 * parameters
    assert numbers["hours_for_20_tokens_per_parameter"] == pytest.approx(20 * parameters / 10_000 / 3600)
    page = lines(point_result)
    assert any("864M" in line and line.endswith("32.9") for line in page)
    assert any(line.startswith("modelled") for line in page) and any("measured here" in line for line in page)


def test_each_combination_of_options_has_its_block() -> None:
    page = lines(
        make_result(SMALL), make_result(make_point(SMALL.model, 1024, 8192, "adamw", checkpointing="block"))
    )
    titles = [line.strip() for line in page if line.startswith("measured here")]
    assert titles == [
        "measured here: bf16, adamw, checkpointing block",
        "measured here: bf16, muon, no activation checkpointing",
    ]


def test_what_has_no_result_says_why() -> None:
    other = make_point(depth(10).model, 1024, 8192)
    assert table.reasons([make_result(SMALL, "failed", "RuntimeError: x")]) == [
        "failed: 8x512 4/4, 59.3M, T 1024, muon: RuntimeError: x"
    ]
    (skipped,) = table.reasons([make_result(SMALL, "skipped", "why"), make_result(other, "skipped", "why")])
    assert skipped == "skipped: 2 points: why"
    (oom,) = table.reasons([make_result(SMALL, "oom", "OutOfMemoryError")])
    assert oom.startswith("oom: ")
    (late,) = table.reasons([PointResult(SMALL, None, "no time")])
    assert late.startswith("no time: 1 point;")
    (unstable,) = table.reasons([make_result(SMALL, finite=False)])
    assert unstable.startswith("unstable: ")
    assert any("unstable" in line and "198" not in line for line in lines(make_result(SMALL, finite=False)))
    (cpu,) = table.reasons([make_result(SMALL, device="cpu", peak_reserved_bytes=None, watts=None)])
    assert cpu.startswith("GiB: ")
    assert table.reasons([make_result(SMALL)]) == []
