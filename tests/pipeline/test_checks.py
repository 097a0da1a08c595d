"""Doctor and probe as phases of the pipeline: what is skipped and why, and what is reused."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deskside.measurements.store import Store, make_key, make_row, open_store
from deskside.pipeline import checks
from deskside.probe.grid import BENCHMARK_SECONDS, calibration_points, estimate_seconds
from deskside.probe.sweep import Sweep
from deskside.utils import child_process
from deskside.utils.machine import Machine
from tests.pipeline.machines import CARD, CPU

RESULT = {
    "tokens_per_second": 1e5,
    "step_seconds": {"median": 0.1, "p10": 0.1, "p90": 0.1},
    "mfu": 0.5,
    "matmul_peak_tflops": 160.0,
    "peak_allocated_bytes": 2**30,
    "peak_reserved_bytes": 2**30,
    "device_used_bytes": 2**31,
    "accumulation": 1,
    "watts": 400.0,
    "precision": "bf16",
}
CARD_RESULT = {"matmul_peak": 1e14, "copy_bandwidth": 1e12}


def result_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point's result, with one row in each forward pass."""
    return {**RESULT, "micro_tokens": spec["sequence_length"]}


# Doctor


def diagnosis(trains: bool) -> dict[str, Any]:
    fix = [{"severity": "slows", "problem": "the disk is full", "remedy": "free some"}]
    checks = [
        {"group": "precision", "name": "fp8-delayed", "verdict": "works", "details": {"native": True}},
        {"group": "precision", "name": "nvfp4", "verdict": "works", "details": {"native": False}},
        {"group": "precision", "name": "fp8-rowwise", "verdict": "wrong numbers", "details": {}},
    ]
    return {
        "trains": trains,
        "why": "" if trains else "no sums",
        "checks": checks,
        "fix": fix,
        "seconds": 3.0,
    }


@pytest.mark.parametrize("trains", [True, False])
def test_doctor(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "examine", lambda quick, say, seconds: diagnosis(trains))
    result = checks.doctor(CPU, 100.0, print)
    assert result["status"] == ("fit" if trains else "unfit")
    told = "2 of 3 checks passed; fix first: the disk is full (free some)"
    assert result["reason"] == (told if trains else "no sums")
    assert result["native_recipes"] == ["fp8-delayed"]


def test_doctor_is_skipped_in_short_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "examine", lambda quick, say, seconds: pytest.fail("it was examined"))
    assert checks.doctor(CARD, 5.0, print) == {
        "status": "skipped",
        "reason": "it takes about 20 s, but only 5 s remain for it beside the probe",
    }


# Probe


def surveying(monkeypatch: pytest.MonkeyPatch, outcome: child_process.ProcessOutcome) -> list[str]:
    """Make the probe's child processes return this outcome, with results if it is
    ok. Return the list of their requests.
    """
    asked: list[str] = []

    def run(target: str, arguments: dict[str, Any], timeout: float) -> child_process.ProcessOutcome:
        asked.append(target.split(":")[1])
        if outcome.status != "ok":
            return outcome
        return replace(outcome, value=result_of(arguments["spec"]) if "spec" in arguments else CARD_RESULT)

    monkeypatch.setattr(checks, "Sweep", functools.partial(Sweep, run=run))
    return asked


def filled(folder: Path, machine: Machine) -> Store:
    """Return a store that already contains every measurement of this machine."""
    store = open_store(folder)
    store.add(make_row("card", make_key(machine, {}), "ok", CARD_RESULT))
    for point in calibration_points(machine.memory_bytes, machine.device):
        store.add(make_row("point", make_key(machine, point.spec), "ok", result_of(point.spec)))
    return store


def test_probe_measures_what_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = surveying(monkeypatch, child_process.ProcessOutcome("ok", None, "", 3.0))
    said: list[str] = []
    points = len(calibration_points(CARD.memory_bytes, "cuda"))
    result = checks.probe(CARD, open_store(tmp_path), 1e6, said.append)
    assert result["status"] == "measured" and result["measured"] == points and result["stored"] == 0
    assert asked == ["measure_card", *["measure_point"] * points]
    assert any("100,000 tokens/s" in line for line in said)
    again = checks.probe(CARD, open_store(tmp_path), 1e6, said.append)
    assert again["status"] == "stored" and again["stored"] == points and again["measured"] == 0
    assert len(asked) == 1 + points


def test_probe_in_short_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = surveying(monkeypatch, child_process.ProcessOutcome("ok", None, "", 3.0))
    result = checks.probe(CARD, open_store(tmp_path / "empty"), 10.0, print)
    assert result["status"] == "skipped" and "10 s remain" in result["reason"]
    assert checks.probe(CARD, open_store(tmp_path / "empty"), -3.0, print)["reason"].count(" 0 s remain")
    assert checks.probe(CARD, filled(tmp_path / "full", CARD), 10.0, print)["status"] == "stored"
    assert asked == []


def test_probe_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = surveying(monkeypatch, child_process.ProcessOutcome("ok", None, "", 3.0))
    with open_store(tmp_path).measuring(CARD.card):
        result = checks.probe(CARD, open_store(tmp_path), 1e6, print)
    assert result == {"status": "skipped", "reason": "another probe is running"} and asked == []


def test_failed_points_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surveying(monkeypatch, child_process.ProcessOutcome("failed", None, "it broke", 3.0))
    result = checks.probe(CARD, open_store(tmp_path), 1e6, print)
    assert result["status"] == "nothing" and result["failed"] and "it broke" in result["failed"][0]


@pytest.mark.parametrize("machine", [CPU, CARD])
def test_three_minutes_have_room_for_a_doctor_and_a_point(machine: Machine) -> None:
    """The README's first command runs from doctor to report, without stored measurements."""
    device, started = machine.device, 2.0
    doctor = checks.doctor_allowance(0.05, machine)
    assert doctor - started >= checks.DOCTOR_SECONDS[device]
    first = calibration_points(machine.memory_bytes, device)[0]
    probe = estimate_seconds(first, [], device, None) + BENCHMARK_SECONDS[device]
    assert doctor + probe <= checks.allowance(0.05, device) <= 90
    assert checks.allowance(24, device) == pytest.approx(2.4 * 3600)


def test_a_doctor_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(quick: bool, say: object, seconds: float) -> object:
        raise TimeoutError

    monkeypatch.setattr(checks, "examine", examine)
    found = checks.doctor(CPU, 30.0, lambda text: None)
    assert found["status"] == "skipped" and "30 s" in found["reason"]
