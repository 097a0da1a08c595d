"""Impossible rows: whichever value of a valid row is replaced, it is reported or does no harm."""

import copy
import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deskside.measurements.store as probe_store
from deskside.measurements.store import Row, hash_of, make_key, make_row, open_store
from deskside.plan.calibrate import calibrate
from deskside.plan.planner import make_plan
from deskside.probe import table
from deskside.probe.grid import make_point
from deskside.probe.sweep import Sweep
from deskside.utils.errors import UsageError
from deskside.utils.printer import Printer
from tests.measurements.test_store import MACHINE
from tests.plan.made import ask
from tests.probe import fakes
from tests.probe.test_grid import depth
from tests.probe.test_sweep import World

BAD: list[Any] = [None, "x", "", [], {}, 0, -1, 0.5, math.nan, math.inf, 1e308, 10**400, True]
POINT = make_point(depth(8).model, 1024, 8192)
RESULT = {**fakes.answer(dict(POINT.spec)), "device": "cuda"}
# A GPU that is in no table: its rates are derived from these two rows only.
UNKNOWN = replace(MACHINE, card="NVIDIA Imaginary 1")


def good() -> list[Row]:
    card = make_row("card", make_key(UNKNOWN, {}), "ok", fakes.measure_card("cuda"), seconds=9.0)
    return [card, make_row("point", make_key(UNKNOWN, POINT.spec), "ok", RESULT, seconds=20.0)]


def paths(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return every path in a row, including nested ones."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*above, name)
            yield from paths(item, (*above, name))


CASES = [(index, path) for index in (0, 1) for path in paths(good()[index])]


def replaced(index: int, path: tuple[str, ...], value: Any, rehash: bool) -> list[Row]:
    """Return both rows, with one value of one of them replaced, or removed if `value` is Ellipsis."""
    rows = copy.deepcopy(good())
    place = rows[index]
    for name in path[:-1]:
        place = place[name]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    if rehash and path[0] == "key" and "key" in rows[index]:
        text = rows[index]["key"]
        rows[index]["hash"] = hash_of(text if isinstance(text, dict) else {"": text})
    return rows


def write(folder: Path, rows: list[Row]) -> None:
    path = open_store(folder).path(UNKNOWN.card)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item)


def used(folder: Path) -> None:
    """Use a store as plan and probe do. Only UsageError may be raised, and no number may be negative."""
    rows = open_store(folder).rows(UNKNOWN)
    calibration = calibrate(None, rows)
    found = [getattr(calibration.rates, name) for name in ("matmul_flops", "bandwidth")]
    for number in [*found, calibration.speed_spread, calibration.overhead_bytes]:
        assert math.isfinite(number) and number >= 0
    asked = ask(here=True, hours=1, preset="124m", probes=str(folder))
    assert asked.measured_watts is None or asked.measured_watts >= 0
    assert asked.setup_seconds is None or asked.setup_seconds >= 0


def surveyed(folder: Path) -> None:
    survey = Sweep(open_store(folder), UNKNOWN, World(), run=World().run).measure([POINT])
    assert survey.point_results
    table.show(Printer(io.StringIO(), 80), survey.point_results)
    for finding in survey.point_results:
        if finding.row is not None and finding.status == "ok":
            told = table.derived(finding.point, finding.row)
            assert all(math.isfinite(number) and number >= 0 for number in numbers(told))
            assert table.spread(finding.row["result"]) >= 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_store, "this_machine", lambda: UNKNOWN)


def test_the_good_rows_are_good(tmp_path: Path, here: None) -> None:
    write(tmp_path, good())
    assert len(open_store(tmp_path).require(UNKNOWN)) == 2 and open_store(tmp_path).notes() == []
    used(tmp_path)
    made = make_plan(ask(here=True, hours=1, preset="124m", probes=str(tmp_path)))
    assert made.best is not None and made.request.calibration.source == "measured"


def test_more_reserved_than_in_use_is_no_room_below_nothing(tmp_path: Path, here: None) -> None:
    write(tmp_path, replaced(1, ("result", "device_used_bytes"), 1, rehash=True))
    assert calibrate(None, open_store(tmp_path).rows(UNKNOWN)).overhead_bytes == 0
    used(tmp_path)


@pytest.mark.parametrize("rehash", [False, True])
@pytest.mark.parametrize(
    ("index", "path"), CASES, ids=lambda v: ".".join(v) if isinstance(v, tuple) else None
)
def test_no_value_does_harm(
    index: int, path: tuple[str, ...], rehash: bool, tmp_path: Path, here: None
) -> None:
    for value in [*BAD, ...]:
        if rehash and path[0] != "key":
            return
        if isinstance(value, float) and not math.isfinite(value) and rehash:
            continue  # such a key has no hash
        write(tmp_path, replaced(index, path, value, rehash))
        for use in (used, surveyed):
            try:
                use(tmp_path)
            except UsageError as error:
                assert "\n" not in str(error) and len(str(error)) < 500


@pytest.mark.parametrize(
    ("index", "path", "value", "words"),
    [
        (0, "result.copy_bandwidth", 0, "greater than or equal to 1000, not 0"),
        (0, "result.copy_bandwidth", -1, "not -1"),
        (0, "result.matmul_peak", None, "not null"),
        (0, "key.spec", {"a": 1}, "must be empty"),
        (1, "result.step_seconds.median", 0, "greater than or equal to 0.000000001, not 0"),
        (1, "result.step_seconds", [], "result.step_seconds: "),
        (1, "result.step_seconds.p90", 1e-6, "is above p90"),
        (1, "result.matmul_peak_tflops", -1, "not -1"),
        (1, "result.matmul_peak_tflops", True, "not true"),
        (1, "result.micro_tokens", 1e308, "whole number"),
        (1, "result.micro_tokens", 1000, "must be a multiple of the sequence length 1024"),
        (1, "result.micro_tokens", 3072, "that divides the step's 8192 tokens"),
        (1, "result.precision", "x" * 99, 'not "xxx'),
        (1, "key.spec", {}, "key.spec.sequence_length is missing"),
        (1, "key.spec.tokens", 0, "not 0"),
        (1, "key.spec.optimizer", "sgd", "'muon' or 'adamw'"),
        (1, "key.spec.model", None, "must be an object, not null"),
        (1, "key.spec.model.head_dim", [1], "key.spec.model.head_dim: must be one value"),
        (1, "key.spec.model.hidden_size", -1, "key.spec.model.hidden_size: "),
        (1, "key.spec.model.num_key_value_heads", 3, "cannot be shared evenly"),
        (1, "key.machine.memory_gib", 1e308, "key.machine.memory_gib: must be a whole number"),
        (1, "seconds", "x", 'field seconds: must be a number, not "x"'),
    ],
)  # fmt: skip
def test_a_damaged_row_is_named_and_passed_over(
    index: int, path: str, value: Any, words: str, tmp_path: Path
) -> None:
    write(tmp_path, replaced(index, tuple(path.split(".")), value, rehash=True))
    store = open_store(tmp_path)
    assert len(store.rows()) == 1
    (note,) = store.notes()
    assert f"imaginary-1.jsonl: 1 line is skipped (line {index + 1}: damaged: field " in note
    assert words in note and "\n" not in note and len(note) < 400


def test_a_hash_that_is_not_its_keys(tmp_path: Path) -> None:
    write(tmp_path, replaced(1, ("key", "spec", "tokens"), 16384, rehash=False))
    assert "damaged: field hash: " in open_store(tmp_path).notes()[0]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_json_or_floats_do_not_have(number: str, tmp_path: Path) -> None:
    """This holds also for a field that nobody reads, because it would be copied."""
    rows = good()
    rows[1]["result"]["loss_last"] = "HERE"
    write(tmp_path, rows)
    path = open_store(tmp_path).path(UNKNOWN.card)
    path.write_text(path.read_text().replace('"HERE"', number))
    assert open_store(tmp_path).notes() == [f"{path}: 1 line is skipped (line 2: this is not JSON)"]


def test_nothing_left_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, replaced(1, ("result", "micro_tokens"), 0, rehash=True)[1:])
    with pytest.raises(
        UsageError, match=r":1: damaged: field result.micro_tokens: .* no other line is valid"
    ):
        open_store(tmp_path).rows(UNKNOWN)
