"""The first phases of `deskside go`: doctor and probe. go.json stores the dict that each returns.

Together they may take a tenth of the time budget. With a short budget they may take more: up to 60 s on a CPU and 90 s
on a GPU, but at most half of the budget. A phase that does not fit is skipped, and the reason is stored. Skipping is
safe, because training itself checks and measures everything that it depends on.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deskside.doctor.examine import examine
from deskside.measurements.store import Busy, Row, Store
from deskside.probe.grid import BENCHMARK_SECONDS, calibration_points, estimate_seconds
from deskside.probe.sweep import PointResult, Sweep
from deskside.utils.format import plural
from deskside.utils.machine import Machine
from deskside.utils.signals import Interrupted

CHECKS_SHARE = 0.1  # share of the time budget for doctor and probe together
# For short budgets: seconds for a quick doctor, the device benchmark and one probe point, but at most this share.
SHORT_CHECKS_SHARE, SHORT_CHECKS_SECONDS = 0.5, {"cuda": 90.0, "cpu": 60.0}
DOCTOR_SHARE = 0.5  # maximum share of the allowance for the doctor
# Expected duration of a quick doctor. It took 12 s on two busy CPU cores.
DOCTOR_SECONDS = {"cuda": 20.0, "cpu": 15.0}
MAX_PROBE_SECONDS = 180.0

Say = Callable[[str], None]  # prints a line and records it
Result = dict[str, Any]  # the result of a phase, JSON-compatible


def skipped(reason: str) -> Result:
    """Return the result of a phase that did not run."""
    return {"status": "skipped", "reason": reason}


def allowance(hours: float, device: str) -> float:
    """Return the seconds that doctor and probe may take together."""
    return max(
        CHECKS_SHARE * hours * 3600, min(SHORT_CHECKS_SHARE * hours * 3600, SHORT_CHECKS_SECONDS[device])
    )


def doctor_allowance(hours: float, machine: Machine) -> float:
    """Return the seconds that the doctor may take. They leave enough for one probe point, or are 0."""
    both = allowance(hours, machine.device)
    first = calibration_points(machine.memory_bytes, machine.device)[0]
    needed = estimate_seconds(first, [], machine.device, None) + BENCHMARK_SECONDS[machine.device]
    return min(DOCTOR_SHARE * both, max(both - needed, 0.0))


def doctor(machine: Machine, seconds: float, say: Say) -> Result:
    """Run a quick doctor if it fits in `seconds`. The status of the result is "fit", "unfit" or "skipped"."""
    needed = DOCTOR_SECONDS[machine.device]
    if seconds < needed:
        left = max(0.0, seconds)
        return skipped(f"it takes about {needed:.0f} s, but only {left:.0f} s remain for it beside the probe")
    try:
        report = examine(True, lambda text: say(f"doctor: {text}"), seconds)
    except TimeoutError:
        return skipped(
            f"it did not finish within {seconds:.0f} s because the machine is busy; run deskside doctor later"
        )
    num_working = sum(check["verdict"] == "works" for check in report["checks"])
    summary = f"{num_working} of {len(report['checks'])} checks passed"
    for fix in report["fix"][:1]:
        summary += f"; fix first: {fix['problem']} ({fix['remedy']})"
    return {
        "status": "fit" if report["trains"] else "unfit",
        "reason": summary if report["trains"] else report["why"],
        "native_recipes": [
            check["name"]
            for check in report["checks"]
            if check["group"] == "precision" and check["verdict"] == "works" and check["details"]["native"]
        ],
        "fix": report["fix"],
        "seconds": report["seconds"],
    }


@dataclass
class ProbeReporter:
    """Prints the probe's progress."""

    say: Say

    def start(self, pending: int) -> None:
        self.say(f"probe: {plural(pending, 'point')} to measure")

    def begin(self, title: str, seconds: float) -> None:
        self.say(f"probe: {title}, about {seconds:.0f} s")

    def end(self, point_result: PointResult) -> None:
        if point_result.status == "ok" and point_result.row is not None:
            self.say(f"probe: {point_result.row['result']['tokens_per_second']:,.0f} tokens/s")
        else:
            self.say(f"probe: {point_result.status}")

    def card(self, row: Row) -> None:
        self.say(f"probe: device benchmark: {row['status']}")


def probe(machine: Machine, store: Store, seconds: float, say: Say) -> Result:
    """Measure the points that calibrate the planner, in at most `seconds`, except those that the store has already."""
    points = calibration_points(machine.memory_bytes, machine.device)
    stored = store.rows(machine)
    have_card = any(row["kind"] == "card" and row["status"] == "ok" for row in stored)
    measured = sum(row["kind"] == "point" and row["status"] == "ok" for row in stored)
    seconds = min(seconds, MAX_PROBE_SECONDS)
    needed = estimate_seconds(points[0], [], machine.device, None)
    needed += 0.0 if have_card else BENCHMARK_SECONDS[machine.device]
    if seconds < needed and measured:
        return {"status": "stored", "stored": measured, "measured": 0}
    if seconds < needed:
        left = max(0.0, seconds)
        return skipped(f"it needs {needed:.0f} s, but only {left:.0f} s remain for it")
    try:
        sweep = Sweep(store, machine, ProbeReporter(say), deadline=time.monotonic() + seconds)
        result = sweep.measure(points)
    except Busy:
        return skipped("another probe is running")
    if result.interrupted:
        raise Interrupted(result.interrupted)
    origins = [point_result.origin for point_result in result.point_results if point_result.status == "ok"]
    failed = [
        f"{f.point.title()}: {f.row['error']}" for f in result.point_results if f.row and f.status == "failed"
    ]
    status = next((origin for origin in ("measured", "stored") if origin in origins), "nothing")
    return {
        "status": status,
        "stored": origins.count("stored"),
        "measured": origins.count("measured"),
        "failed": failed,
    }
