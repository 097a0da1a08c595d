"""Rates of a card for the operator model, and the range of the resulting speed.

The device's rates come from the best of three sources. Points that `deskside probe` measured on this card: three
factors (products, traffic, fixed delays) are fitted to them by ridge regression, each drawn towards the prior, less so
with more points. Without points: the data sheet and published measurements (`plan/published.py`). Without a data
sheet: an error, because an unknown card is measured and never guessed.

The host's times are those of the reference machine (`budget/host.py`) unless the probe timed this one: the least that
any point took to launch a step, relative to the model, is a factor on all of them.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deskside.budget.host import HostTimes, device_seconds, host_seconds
from deskside.budget.operators import PRODUCTS, TRAFFIC, Group, step_operators
from deskside.budget.speed import Rates, operator_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.facts.gpus import Gpu
from deskside.plan.published import ANCHOR, Gain, architecture_factor, fitted, sheet_rates
from deskside.utils.errors import UsageError

Source = Literal["measured", "published", "modelled"]

COPY_SHARE = 0.867  # a large copy's share of the data sheet's bandwidth: 4.16 of 4.8 TB/s on an H200
CONTEXT_BYTES = 900 * 2**20  # CUDA context and library handles; 770 MiB on an H200 with torch 2.11
NOISE = 0.03  # of one measured point
# Standard deviation, as a share, of products, traffic and delays before anything is measured.
PRIOR_SPREAD = {"cuda": (0.15, 0.25, 0.5), "cpu": (1.0, 2.0, 4.0)}
FEW_ROWS = 5  # published runs of an architecture below which its range is wider
NARROWEST, PUBLISHED_SPREAD, FEW_SPREAD = 0.08, 0.25, 0.35
# Each architecture predicted from the others alone: nine in ten rows are within 22 %, the worst is 36.5 % off
# (benchmarks/planner_published.py).
UNKNOWN_SPREAD = 0.40
MEMORY_SPREAD = {"measured": 0.05, "published": 0.10}
SMALLEST_FACTOR = 0.1


@dataclass(frozen=True)
class Calibration:
    """Rates of a card, with the ranges of predictions made from them.

    Attributes:
        speed_spread, memory_spread: Half-widths of the ranges of tokens/s and bytes, as shares.
        basis: One line on where the rates come from.
        overhead_bytes: Memory of a process on the card beside torch's allocator.
        host_measured: Whether the host's times are this machine's.
    """

    rates: Rates
    speed_spread: float
    memory_spread: float
    source: Source
    basis: str
    overhead_bytes: int
    host_measured: bool = False


def calibrate(gpu: Gpu | None, points: Sequence[Mapping[str, Any]]) -> Calibration:
    """Return the best calibration for a card. points: its rows of the probe store, kinds "card" and "point" alike.

    Raises UsageError for a card that is in no table and was not measured.
    """
    good = [
        row for row in points if row["kind"] == "point" and row["status"] == "ok" and _is_informative(row)
    ]
    card = next(
        (row["result"] for row in reversed(points) if row["kind"] == "card" and row["status"] == "ok"), None
    )
    if good:
        return _measured(gpu, good, card)
    if gpu is None:
        raise UsageError("this device is in no table and was not measured; measure it with: deskside probe")
    return _published(gpu)


def measured_fp8_gain(rows: Sequence[Mapping[str, Any]]) -> Gain | None:
    """Return the median speed-up of FP8 over pairs of probe points that differ in nothing else, None without a pair."""
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "point" and row["status"] == "ok":
            asked, result = row["key"]["spec"], row["result"]
            same = {key: value for key, value in asked.items() if key != "precision"}
            kind = "fp8" if str(result.get("precision")).startswith("fp8-") else str(result.get("precision"))
            by_kind = seconds.setdefault(json.dumps([same, result["micro_tokens"]], sort_keys=True), {})
            by_kind[kind] = float(result["step_seconds"]["median"])
    gains = [found["bf16"] / found["fp8"] for found in seconds.values() if {"bf16", "fp8"} <= set(found)]
    if not gains:
        return None
    count = f"{len(gains)} pairs of points" if len(gains) != 1 else "one pair of points"
    return Gain(statistics.median(gains), f"measured: {count} on this card with deskside probe")


def _is_informative(row: Mapping[str, Any]) -> bool:
    """Return whether a point tells the device's own speed: it is in the format that the device is rated in, and the
    device does not wait for the host, which takes as long on any card."""
    result = row["result"]
    rated = ("bf16", "fp32") if result.get("device") == "cpu" else ("bf16",)
    if result.get("precision", "bf16") not in rated:
        return False
    host = HostTimes().scaled(_host_factor([row]) or 1.0)
    return host_seconds(*_step(row), host) < 0.9 * float(result["step_seconds"]["median"])


def _host_factor(points: Sequence[Mapping[str, Any]]) -> float | None:
    """Return this machine's host time relative to the reference's, None where no point timed it.

    The least over the points counts: launching blocks when the device's queue is full, which only makes it look slower.
    """
    found = []
    for row in points:
        launch = row["result"].get("launch_seconds")
        shape, spec = _step(row)
        modelled = host_seconds(shape, spec, HostTimes())
        if launch and spec.fused and modelled:
            found.append(float(launch) / modelled)
    return min(found, default=None)


def _published(gpu: Gpu) -> Calibration:
    factor, basis = architecture_factor(gpu)
    rows = fitted().rows.get(gpu.architecture, 0)
    spread = PUBLISHED_SPREAD if rows >= FEW_ROWS else FEW_SPREAD if rows else UNKNOWN_SPREAD
    if gpu.architecture == ANCHOR:
        spread = PUBLISHED_SPREAD
    rate = "measured and published" if gpu.measured_bf16_flops is not None else "from the data sheet"
    return Calibration(
        rates=sheet_rates(gpu).corrected(1 / factor, 1 / factor, 1.0),
        speed_spread=spread,
        memory_spread=MEMORY_SPREAD["published"],
        source="published",
        basis=f"matmul rate {rate}, bandwidth from the data sheet, {basis}; not measured on this card",
        overhead_bytes=CONTEXT_BYTES,
    )


def _measured(
    gpu: Gpu | None, points: Sequence[Mapping[str, Any]], card: Mapping[str, Any] | None
) -> Calibration:
    device = str(points[-1]["result"].get("device", "cuda"))
    peak = statistics.median(float(row["result"]["matmul_peak_tflops"]) * 1e12 for row in points)
    if gpu is not None:
        factor, _ = architecture_factor(gpu)
        start = replace(sheet_rates(gpu).corrected(1 / factor, 1 / factor, 1.0), matmul_flops=peak)
    elif card is not None:
        start = Rates(peak, float(card["copy_bandwidth"]) / COPY_SHARE)
    else:
        raise UsageError("this device was measured without its bandwidth; measure it with: deskside probe")
    host_factor = _host_factor(points)
    start = replace(start, host=start.host.scaled(host_factor or 1.0))
    factors, spread = _fit(points, start, PRIOR_SPREAD["cpu" if device == "cpu" else "cuda"])
    # Use on the device is read at the end, when torch may have returned some memory: at least 0.
    overhead = [
        max(0, int(result["device_used_bytes"]) - int(result["peak_reserved_bytes"]))
        for result in (row["result"] for row in points)
        if result.get("device_used_bytes") and result.get("peak_reserved_bytes")
    ]
    unmeasured_overhead = 0 if device == "cpu" else CONTEXT_BYTES
    count = f"{len(points)} points" if len(points) != 1 else "one point"
    return Calibration(
        rates=start.corrected(*factors),
        speed_spread=spread,
        memory_spread=MEMORY_SPREAD["measured"],
        source="measured",
        basis=f"{count} measured on this card with deskside probe",
        overhead_bytes=int(statistics.median(overhead)) if overhead else unmeasured_overhead,
        host_measured=host_factor is not None,
    )


def _fit(
    points: Sequence[Mapping[str, Any]], start: Rates, prior_spread: tuple[float, float, float]
) -> tuple[tuple[float, float, float], float]:
    """Return the factors on products, traffic and delays, and the spread that is left.

    Ridge regression of each point's step time on its three parts, in relative terms, so that each factor is drawn
    towards 1. The spread is twice the root mean square of the leave-one-out errors, and at least NARROWEST.
    """
    import numpy as np  # only measured cards need it, and it takes a fifth of a plan's time to import

    pull = NOISE / np.array(prior_spread)

    def ridge(A: np.ndarray, b: np.ndarray) -> np.ndarray:
        solved, *_ = np.linalg.lstsq(np.vstack([A, np.diag(pull)]), np.concatenate([b, pull]), rcond=None)
        return solved

    table, rest = [], []
    for row in points:
        shape, spec = _step(row)
        parts = [0.0] * 4  # products, traffic, delays, and the part that no factor changes
        for operator in step_operators(shape, spec):
            parts[_column(operator.group)] += operator_seconds(operator, start, spec)
        host = host_seconds(shape, spec, start.host)
        seconds = device_seconds(float(row["result"]["step_seconds"]["median"]), host, start.host.overlap)
        table.append([part / seconds for part in parts[:3]])
        rest.append(1 - parts[3] / seconds)
    A, b = np.array(table), np.array(rest)
    left_out = [A[i] @ ridge(np.delete(A, i, 0), np.delete(b, i)) - b[i] for i in range(len(b))]
    spread = 2 * float(np.sqrt(np.mean(np.square(left_out))))
    limit = FEW_SPREAD if len(b) == 1 else 1.0
    compute, memory, delay = (float(max(SMALLEST_FACTOR, f)) for f in ridge(A, b))
    return (compute, memory, delay), min(limit, max(NARROWEST, spread))


def _step(row: Mapping[str, Any]) -> tuple[ModelConfig, StepSpec]:
    """Return the model and the optimizer step of a measured point."""
    asked, result = row["key"]["spec"], row["result"]
    spec = StepSpec(
        sequence_length=asked["sequence_length"],
        tokens=asked["tokens"],
        micro_tokens=result["micro_tokens"],
        optimizer=asked.get("optimizer", "muon"),
        precision=result.get("precision", "bf16"),
        activation_checkpointing=asked.get("activation_checkpointing", "none"),
        compiled=result.get("compile", "block") != "off",
        copies="step" if result.get("compile") == "fused" else "pass",
    )
    return ModelConfig(**asked["model"]), spec


def _column(group: Group) -> int:
    if group in PRODUCTS:
        return 0
    if group in TRAFFIC:
        return 1
    return 2 if group == "layers" else 3
