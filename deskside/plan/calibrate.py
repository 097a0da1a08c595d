"""From what is known of a card to the rates that the operator model uses, and how far the result may be off.

Three sources for the device, best first. Points that `deskside probe` measured on this card: three factors
(products, traffic, fixed delays) are fitted to them, each pulled towards what was believed before, the less
the more points there are. Without points: the data sheet and published measurements (`plan/published.py`).
Without a data sheet too: nothing, because an unknown card is measured, never guessed.

The host's times are those of the machine that taught them (`budget/host.py`) unless the probe timed this machine's: the
least that a point took to launch a step, against what the model says of it, is a factor on all of them.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from deskside.budget.host import HostTimes, device_part, host_seconds
from deskside.budget.operators import ITEM_OF, Group, step_operators
from deskside.budget.speed import Rates, operator_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.facts.gpus import Gpu
from deskside.plan.published import ANCHOR, architecture_factor, fitted, sheet_rates
from deskside.utils.errors import UsageError

Source = Literal["measured", "published", "modelled"]

COPY_SHARE = 0.867  # what a large copy reaches of the data sheet's bandwidth: 4.16 of 4.8 TB/s on an H200
CONTEXT_BYTES = 900 * 2**20  # CUDA context and library handles; 770 MiB on an H200 with torch 2.11
NOISE = 0.03  # of one measured point
# How far products, traffic and delays may be off before anything is measured, as a share (one standard deviation).
BELIEF = {"cuda": np.array([0.15, 0.25, 0.5]), "cpu": np.array([1.0, 2.0, 4.0])}
FEW_ROWS = 5  # published runs of an architecture below which its range is wider
NARROWEST, PUBLISHED_SPREAD, FEW_SPREAD = 0.08, 0.25, 0.35
# Each architecture predicted from the others alone: nine in ten rows are within 22 %, the worst is 36.5 % off
# (benchmarks/planner_unknown.py).
UNKNOWN_SPREAD = 0.40
MEMORY_SPREAD = {"measured": 0.05, "published": 0.10}
SMALLEST_FACTOR = 0.1


@dataclass(frozen=True)
class Calibration:
    """Rates, and the ranges that go with them.

    speed_spread, memory_spread: half-widths of the ranges of tokens/s and bytes, as shares; basis: one line, from what;
    overhead_bytes: what a process takes on the card beside torch's allocator; host_measured: the host's times are this
    machine's.
    """

    rates: Rates
    speed_spread: float
    memory_spread: float
    source: Source
    basis: str
    overhead_bytes: int
    host_measured: bool = False


def calibrate(gpu: Gpu | None, points: Sequence[Mapping[str, Any]]) -> Calibration:
    """The best that is known. points: rows of the probe store for this card, "card" and "point" alike.

    Raises UsageError for a card that is in no table and was not measured.
    """
    good = [row for row in points if row["kind"] == "point" and row["status"] == "ok" and _tells(row)]
    card = next(
        (row["result"] for row in reversed(points) if row["kind"] == "card" and row["status"] == "ok"), None
    )
    if not good and gpu is None:
        raise UsageError("this device is in no table and was not measured; measure it with: deskside probe")
    if not good:
        assert gpu is not None
        return _published(gpu)
    return _measured(gpu, good, card)


def _tells(row: Mapping[str, Any]) -> bool:
    """Whether a point says something of the device's own speed: in the format that it is rated in, and not one where
    the device waits for the host (the host takes as long whatever the card)."""
    result = row["result"]
    rated = ("bf16", "fp32") if result.get("device") == "cpu" else ("bf16",)
    if result.get("precision", "bf16") not in rated:
        return False
    shape, spec = _step(row)
    host = HostTimes().times(_host_factor([row]) or 1.0)
    return host_seconds(shape, spec, host) < 0.9 * float(result["step_seconds"]["median"])


def _host_factor(points: Sequence[Mapping[str, Any]]) -> float | None:
    """Return this machine's host time against the reference's, None where no point timed it.

    The least over the points: launching stops when the device's queue is full, which can only make it seem longer.
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
    else:
        if card is None:
            raise UsageError(
                "this device was measured without its bandwidth; measure it with: deskside probe"
            )
        start = Rates(peak, float(card["copy_bandwidth"]) / COPY_SHARE)
    of_host = _host_factor(points)
    start = replace(start, host=start.host.times(of_host or 1.0))
    factors, spread = _fit(points, start, BELIEF["cpu" if device == "cpu" else "cuda"])
    beside = [  # not below nothing: what was in use is read at the end, when torch may have given some back
        max(0, int(r["device_used_bytes"]) - int(r["peak_reserved_bytes"]))
        for r in (row["result"] for row in points)
        if r.get("device_used_bytes") and r.get("peak_reserved_bytes")
    ]
    count = f"{len(points)} points" if len(points) != 1 else "one point"
    return Calibration(
        rates=replace(start.corrected(*factors), source="measured"),
        speed_spread=spread,
        memory_spread=MEMORY_SPREAD["measured"],
        source="measured",
        basis=f"{count} measured on this card with deskside probe",
        overhead_bytes=int(statistics.median(beside))
        if beside
        else (0 if device == "cpu" else CONTEXT_BYTES),
        host_measured=of_host is not None,
    )


def _fit(
    points: Sequence[Mapping[str, Any]], start: Rates, belief: np.ndarray
) -> tuple[tuple[float, float, float], float]:
    """(factors on products, traffic and delays; the spread that is left).

    Ridge regression of each point's step time on its three parts, in relative terms. The spread is twice the root mean
    square of the errors that points show when each is left out, and never below NARROWEST.
    """
    table, rest = [], []
    for row in points:
        parts = _parts(row, start)
        shape, spec = _step(row)
        host = host_seconds(shape, spec, start.host)
        seconds = device_part(float(row["result"]["step_seconds"]["median"]), host, start.host.overlap)
        table.append(parts[:3] / seconds)
        rest.append(1 - parts[3] / seconds)
    A, b = np.array(table), np.array(rest)
    factors = _ridge(A, b, belief)
    left_out = [
        float(A[i] @ _ridge(np.delete(A, i, 0), np.delete(b, i), belief) - b[i]) for i in range(len(b))
    ]
    spread = 2 * float(np.sqrt(np.mean(np.square(left_out))))
    limit = FEW_SPREAD if len(b) == 1 else 1.0
    compute, memory, delay = (float(max(SMALLEST_FACTOR, f)) for f in factors)
    return (compute, memory, delay), min(limit, max(NARROWEST, spread))


def _ridge(A: np.ndarray, b: np.ndarray, belief: np.ndarray) -> np.ndarray:
    pull = NOISE / belief
    left = np.vstack([A, np.diag(pull)])
    right = np.concatenate([b, pull])
    solved, *_ = np.linalg.lstsq(left, right, rcond=None)
    return solved


def _parts(row: Mapping[str, Any], rates: Rates) -> np.ndarray:
    """Modelled seconds of a point's step: products, traffic, delays, and what no factor touches."""
    parts = np.zeros(4)
    shape, spec = _step(row)
    for operator in step_operators(shape, spec):
        parts[_column(operator.group)] += operator_seconds(operator, rates, spec)
    return parts


def _step(row: Mapping[str, Any]) -> tuple[ModelConfig, StepSpec]:
    """The model and the optimiser step of a measured point."""
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
    if group in ("matmul", "head", "attention", "optimizer_matmul"):
        return 0
    if group in ("traffic", "quantize", "loss_traffic", "weights", "optimizer_traffic"):
        return 1
    return 2 if ITEM_OF[group] == "launches" else 3
