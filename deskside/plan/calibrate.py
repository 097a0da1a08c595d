"""Calibration of the operator model to a card: its rates, and the uncertainty of predictions made from them.

The device's rates come from the first of these sources that is available:

1. Points that `deskside probe` measured on this card. Ridge regression fits three factors to them, which multiply the
   modelled times of matrix products, of memory traffic and of fixed delays. The prior is a factor of 1; the more
   points, the less it weighs.
2. Reports by other owners of such a card (`measurements/reported.py`). Each report is fitted alone, as in 1., and has
   one vote: the rates are the medians over the reports.
3. The data sheet, corrected by published measurements of the architecture (`plan/published.py`).

A card that has none of them must be measured first (UsageError).

The host's times are those of the reference machine (`budget/host.py`) unless the probe timed this machine. Then all of
them are multiplied by one factor: the minimum over the points of measured launch time / modelled host time.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deskside.budget.host import HostTimes, device_seconds, host_seconds
from deskside.budget.operators.operator import DELAYS, PRODUCTS, TRAFFIC, Group
from deskside.budget.operators.step import step_operators
from deskside.budget.speed import Rates, operator_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.config.recipes import ALIASES
from deskside.facts.gpus import Gpu
from deskside.measurements.reported import Reported
from deskside.plan.published import (
    REFERENCE_ARCHITECTURE,
    Speedup,
    architecture_factor,
    speed_factors,
    uncalibrated_rates,
)
from deskside.utils.errors import UsageError
from deskside.utils.format import plural

Source = Literal["measured", "reported", "published"]

COPY_SHARE = 0.867  # bandwidth of a large copy / data sheet: 4.16 of 4.8 TB/s on an H200
CONTEXT_BYTES = 900 * 2**20  # CUDA context and library handles; 770 MiB on an H200 with torch 2.11
NOISE = 0.03  # relative standard deviation of the step time of one measured point
# A point measures the device if launching takes less than this share of its step, by the model of the host. It is far
# below 1 because of the model's errors: a step that waited for the host took 1.48 times the modelled time of its host
# (docs/planner-accuracy.md, the draw of 2026-12-01).
DEVICE_BOUND = 2 / 3
# Standard deviation of the prior of the factors on products, traffic and delays.
PRIOR_SPREAD = {"cuda": (0.15, 0.25, 0.5), "cpu": (1.0, 2.0, 4.0)}
# Half-widths of the range of predicted speeds, as shares: the minimum for a measured card; for an architecture with at
# least FEW_ROWS published runs; for one with fewer, and the maximum for a card with one measured point.
MIN_SPREAD, PUBLISHED_SPREAD, FEW_ROWS_SPREAD = 0.08, 0.25, 0.35
FEW_ROWS = 5
# For an architecture without published runs. If each architecture is predicted only from the others, nine in ten rows
# are within 22 %, and the worst is 36.5 % off (benchmarks/planner_published.py).
UNKNOWN_SPREAD = 0.40
# Minimum for a card that others measured. Their drivers, coolers and power limits differ: large products on cards of
# one name are within 7 % of their middle in gpus.csv (column measured_source), except one RTX 5090 that is 23 % off.
REPORTED_SPREAD = 0.15
# deskside's own runs on an H200 are within it (docs/planner-accuracy.md), on other cards it is not measured.
MEMORY_SPREAD = {"measured": 0.05, "reported": 0.10, "published": 0.10}
# The worst of 9 published runs of other trainers (tests/plan/test_published.py). The three at 21 % have connections
# between blocks that our shapes lack, so this is no range of our own runs, but the only check on other cards.
OTHERS_MEMORY_ERROR = 0.21
MIN_FACTOR = 0.1  # lower bound of a fitted factor


@dataclass(frozen=True)
class Calibration:
    """Rates of a card, and the ranges of predictions made from them.

    Attributes:
        speed_spread, memory_spread: Half-widths of the ranges of tokens/s and bytes, as shares.
        basis: Source of the rates, in one line.
        overhead_bytes: Device memory of a process outside torch's allocator.
        host_measured: True if the host's times were measured on this machine.
        reports: Digests of the reports that the rates come from.
    """

    rates: Rates
    speed_spread: float
    memory_spread: float
    source: Source
    basis: str
    overhead_bytes: int
    host_measured: bool = False
    reports: tuple[str, ...] = ()


def calibrate(
    gpu: Gpu | None, points: Sequence[Mapping[str, Any]], reports: Sequence[Reported] = ()
) -> Calibration:
    """Return the best available calibration of a card.

    gpu: its data sheet, if known. points: its rows in the probe store, of the kinds "card" (benchmark of the GPU) and
    "point" (training run). reports: what other owners reported of such cards.
    Raises UsageError for a card that has neither a data sheet nor a usable measurement.
    """
    ran = [row for row in points if row["kind"] == "point" and row["status"] == "ok"]
    usable, host_factor = _usable(ran)
    card = next(
        (row["result"] for row in reversed(points) if row["kind"] == "card" and row["status"] == "ok"), None
    )
    if usable:
        return _measured(gpu, usable, card, host_factor)
    if gpu is None:
        raise UsageError(
            "this device is not in the table of GPUs and was not measured; measure it with: deskside probe"
        )
    return _reported(gpu, reports) or _published(gpu)


def measured_fp8_speedup(rows: Sequence[Mapping[str, Any]]) -> Speedup | None:
    """Return the median speedup of `--precision fp8` over BF16 in points that differ only in this; None without any."""
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "point" and row["status"] == "ok":
            spec, result = row["key"]["spec"], row["result"]
            others = {key: value for key, value in spec.items() if key != "precision"}
            settings = json.dumps([others, result["micro_tokens"]], sort_keys=True)
            precision = str(result.get("precision"))
            by_recipe = seconds.setdefault(settings, {})
            by_recipe[ALIASES.get(precision, precision)] = float(result["step_seconds"]["median"])
    fp8 = ALIASES["fp8"]
    gains = [point["bf16"] / point[fp8] for point in seconds.values() if {"bf16", fp8} <= set(point)]
    if not gains:
        return None
    count = f"{len(gains)} pairs of points" if len(gains) != 1 else "one pair of points"
    return Speedup(statistics.median(gains), f"measured: {count} on this card with deskside probe")


def _usable(points: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], float | None]:
    """Return the points of one machine that measure the speed of its device, and the factor of its host.

    They use the format of the measured matmul rate, and the host does not limit their steps.
    """
    rated = [row for row in points if _in_rated_format(row)]
    factor = _host_factor(rated)
    host = HostTimes().scaled(factor or 1.0)
    return [row for row in rated if not _waits_for_host(row, host)], factor


def _in_rated_format(row: Mapping[str, Any]) -> bool:
    result = row["result"]
    return result.get("precision", "bf16") in (
        ("bf16", "fp32") if result.get("device") == "cpu" else ("bf16",)
    )


def _waits_for_host(row: Mapping[str, Any], host: HostTimes) -> bool:
    return host_seconds(*_step(row), host) >= DEVICE_BOUND * float(row["result"]["step_seconds"]["median"])


def _host_factor(points: Sequence[Mapping[str, Any]]) -> float | None:
    """Return this machine's host time relative to the reference machine's; None if no fused step timed it.

    It is the minimum over the points that launched their passes, because launches block while the device's queue is
    full. A blocked launch makes the host look slower, never faster.
    """
    factors = []
    for row in points:
        launch = row["result"].get("launch_seconds")
        shape, spec = _step(row)
        modelled = host_seconds(shape, spec, HostTimes())
        if launch and spec.fused and spec.graphs == "off" and modelled:
            factors.append(float(launch) / modelled)
    return min(factors, default=None)


def _published(gpu: Gpu) -> Calibration:
    """Return the calibration of a card that was not measured, from its data sheet and published runs."""
    factor, basis = architecture_factor(gpu)
    rows = speed_factors().rows.get(gpu.architecture, 0)
    if gpu.architecture == REFERENCE_ARCHITECTURE or rows >= FEW_ROWS:
        spread = PUBLISHED_SPREAD
    else:
        spread = FEW_ROWS_SPREAD if rows else UNKNOWN_SPREAD
    rate = "measured and published" if gpu.measured_bf16_flops is not None else "from the data sheet"
    return Calibration(
        rates=uncalibrated_rates(gpu).corrected(1 / factor, 1 / factor, 1.0),
        speed_spread=spread,
        memory_spread=MEMORY_SPREAD["published"],
        source="published",
        basis=f"matmul rate {rate}, bandwidth from the data sheet, {basis}; not measured on this card",
        overhead_bytes=CONTEXT_BYTES,
    )


def _reported(gpu: Gpu, reports: Sequence[Reported]) -> Calibration | None:
    """Return the calibration from the reports of other owners; None if none of them has a usable point.

    Product rate, traffic rate and delay are the medians over the reports, so with three or more a single wrong report
    changes little. The half-width of the speed's range is at least REPORTED_SPREAD, at least the median of the reports'
    own, and twice the median distance of their product rates from the middle. The host's times stay the reference's,
    because the owners' hosts are not this one.
    """
    usable: dict[str, Calibration] = {}
    points = 0
    for entry in reports:
        rows, host_factor = _usable([point.probe_row() for point in entry.report.points])
        if rows:
            usable[entry.digest] = _measured(gpu, rows, None, host_factor)
            points += len(rows)
    if not usable:
        return None
    fits = list(usable.values())
    products = [fit.rates.matmul_flops / fit.rates.compute for fit in fits]
    middle = statistics.median(products)
    matmul = statistics.median(fit.rates.matmul_flops for fit in fits)
    rates = replace(
        fits[0].rates,
        matmul_flops=matmul,
        compute=matmul / middle,
        memory=statistics.median(fit.rates.memory for fit in fits),
        delay=statistics.median(fit.rates.delay for fit in fits),
        host=HostTimes(),
    )
    between = 2 * statistics.median(abs(rate / middle - 1) for rate in products)
    fitted = statistics.median(fit.speed_spread for fit in fits)
    used = [entry.report for entry in reports if entry.digest in usable]
    peaks = sorted(fit.rates.matmul_flops / 1e12 for fit in fits)
    span = f"{peaks[0]:.0f} TFLOP/s" if len(fits) == 1 else f"{peaks[0]:.0f} to {peaks[-1]:.0f} TFLOP/s"
    return Calibration(
        rates=rates,
        speed_spread=min(1.0, max(REPORTED_SPREAD, fitted, between)),
        memory_spread=MEMORY_SPREAD["reported"],
        source="reported",
        basis=f"{plural(points, 'point')} in {plural(len(fits), 'report')} by other owners of such a card (products at "
        f"{span}, torch {', '.join(sorted({report.torch for report in used}))}, newest "
        f"{max(report.date for report in used)}); not measured on this card",
        overhead_bytes=int(statistics.median(fit.overhead_bytes for fit in fits)),
        reports=tuple(usable),
    )


def _measured(
    gpu: Gpu | None,
    points: Sequence[Mapping[str, Any]],
    card: Mapping[str, Any] | None,
    host_factor: float | None,
) -> Calibration:
    """Return the calibration from points that measure the device.

    card: result of the device benchmark, None if it did not run. host_factor: of the host, None if no point timed it.
    """
    device = str(points[-1]["result"].get("device", "cuda"))
    peak = statistics.median(float(row["result"]["matmul_peak_tflops"]) * 1e12 for row in points)
    if gpu is not None:
        factor, _ = architecture_factor(gpu)
        prior = replace(uncalibrated_rates(gpu).corrected(1 / factor, 1 / factor, 1.0), matmul_flops=peak)
    elif card is not None:
        prior = Rates(peak, float(card["copy_bandwidth"]) / COPY_SHARE)
    else:
        raise UsageError(
            "the bandwidth of this device has not been measured; measure it with: deskside probe"
        )
    prior = replace(prior, host=prior.host.scaled(host_factor or 1.0))
    factors, spread = _fit(points, prior, PRIOR_SPREAD["cpu" if device == "cpu" else "cuda"])
    # device_used_bytes are read at the end of a point. They may be less than the peak that torch had reserved.
    overhead = [
        max(0, int(result["device_used_bytes"]) - int(result["peak_reserved_bytes"]))
        for result in (row["result"] for row in points)
        if result.get("device_used_bytes") and result.get("peak_reserved_bytes")
    ]
    unmeasured_overhead = 0 if device == "cpu" else CONTEXT_BYTES
    count = f"{len(points)} points" if len(points) != 1 else "one point"
    return Calibration(
        rates=prior.corrected(*factors),
        speed_spread=spread,
        memory_spread=MEMORY_SPREAD["measured"],
        source="measured",
        basis=f"{count} measured on this card with deskside probe",
        overhead_bytes=int(statistics.median(overhead)) if overhead else unmeasured_overhead,
        host_measured=host_factor is not None,
    )


def _fit(
    points: Sequence[Mapping[str, Any]], prior: Rates, prior_spread: tuple[float, float, float]
) -> tuple[tuple[float, float, float], float]:
    """Return the factors on the times of products, traffic and delays, and the half-width of the speed's range.

    Let p, t, d be the modelled seconds of the three groups at one point, and r those of the rest. The factors solve
    f1 p + f2 t + f3 d = measured - r. Dividing this by the measured device seconds gives a row of A f = b whose error
    has the standard deviation NOISE. The Gaussian prior f_k = 1 +- prior_spread_k adds the row w_k f_k = w_k, whose
    error has the same deviation if w_k = NOISE / prior_spread_k. The least-squares solution of all rows is then the
    maximum a posteriori estimate (ridge regression towards 1).

    The half-width is twice the root mean square of the leave-one-out errors, at least MIN_SPREAD and at most 1, or
    FEW_ROWS_SPREAD with one point.
    """
    import numpy as np  # here, because only measured cards need it, and the import takes a fifth of a plan's time

    weights = NOISE / np.array(prior_spread)

    def ridge(A: np.ndarray, b: np.ndarray) -> np.ndarray:
        with_prior = np.vstack([A, np.diag(weights)]), np.concatenate([b, weights])
        factors, *_ = np.linalg.lstsq(*with_prior, rcond=None)
        return factors

    table, targets = [], []
    for row in points:
        shape, spec = _step(row)
        parts = [0.0] * 4  # seconds of products, traffic, delays, and operators without a factor
        for operator in step_operators(shape, spec):
            parts[_part_of(operator.group)] += operator_seconds(operator, prior, spec)
        host = host_seconds(shape, spec, prior.host)
        seconds = device_seconds(float(row["result"]["step_seconds"]["median"]), host, prior.host.overlap)
        table.append([part / seconds for part in parts[:3]])
        targets.append(1 - parts[3] / seconds)
    A, b = np.array(table), np.array(targets)
    errors = [A[i] @ ridge(np.delete(A, i, 0), np.delete(b, i)) - b[i] for i in range(len(b))]
    spread = 2 * float(np.sqrt(np.mean(np.square(errors))))
    max_spread = FEW_ROWS_SPREAD if len(b) == 1 else 1.0
    compute, memory, delay = (float(max(MIN_FACTOR, f)) for f in ridge(A, b))
    return (compute, memory, delay), min(max_spread, max(MIN_SPREAD, spread))


def _step(row: Mapping[str, Any]) -> tuple[ModelConfig, StepSpec]:
    """Return the model and the optimizer step of a measured point."""
    point, result = row["key"]["spec"], row["result"]
    spec = StepSpec(
        sequence_length=point["sequence_length"],
        tokens=point["tokens"],
        micro_tokens=result["micro_tokens"],
        optimizer=point.get("optimizer", "muon"),
        precision=result.get("precision", "bf16"),
        activation_checkpointing=point.get("activation_checkpointing", "none"),
        compiled=result.get("compile", "block") != "off",
        copies="step" if result.get("compile") == "fused" else "pass",
        graphs="on" if result.get("replays") else "off",
    )
    return ModelConfig(**point["model"]), spec


def _part_of(group: Group) -> int:
    """Return the index into the parts of a step that `_fit` distinguishes."""
    if group in PRODUCTS:
        return 0
    if group in TRAFFIC:
        return 1
    return 2 if group in DELAYS else 3
