"""A card report made of real results: those of an H200 in docs/data, stored on 2026-11-20."""

import datetime
import functools
import json
from pathlib import Path
from typing import Any

from deskside.measurements.card_report import make_report
from deskside.measurements.store import Machine, open_store

PROBES = Path(__file__).parents[2] / "docs/data/2026-11-20-planner/probes"
H200 = Machine(
    "NVIDIA H200", "cuda", 150_110_011_392, 0, "580.159.04", 700, "2.11.0+cu130", "13.0", "3.6.0",
    "0.1.0+c3fc8ba3d2e8",
)  # fmt: skip
DATE = datetime.date(2026, 11, 20)
DOCTOR = {"bf16": "works", "step_bf16": "works", "fp8_row": "unsupported"}


@functools.cache
def _text() -> str:
    rows = open_store(PROBES).rows(H200)
    return json.dumps(make_report(H200, rows, DOCTOR, DATE).to_json())


def made() -> dict[str, Any]:
    """Return a new copy of the report as a JSON value."""
    return json.loads(_text())


def faster(report: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return the report of a GPU that is `factor` times as fast in every number."""
    report["benchmark"] = {name: factor * value for name, value in report["benchmark"].items()}
    for point in report["points"]:
        point["matmul_flops"] *= factor
        point["step_seconds"] = {name: value / factor for name, value in point["step_seconds"].items()}
    return report
