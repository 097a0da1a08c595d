"""Checks of a card report against the data sheet of its card: physically impossible values are refused.

The limits leave room for what owners do to a card. Large BF16 products of 30 desktop and data-centre cards reach at
most 1.13 of the data sheet (facts/gpus.csv), because most cards boost above their specified clock. A laptop's depends
on the power that its maker allows, up to 1.7. A power limit slows a card to a fraction of its data sheet, but not to a
twentieth, which is how a wrong unit shows.
"""

import datetime

from deskside.budget.shape import flops_per_token, num_params
from deskside.facts.gpus import Gpu, find_device, gpus
from deskside.measurements.card_report import CardReport, ReportedPoint
from deskside.utils.errors import UsageError
from deskside.utils.format import gib

FASTEST, FASTEST_LAPTOP = 1.25, 1.9  # of the data sheet's rate of products
FASTEST_MEMORY = 1.15  # of the data sheet's bandwidth, for owners who raise the memory clock
SLOWEST = 0.05
STEP_OVER_PRODUCT = 1.1  # a step is slower than its products; clocks may rise between the two timings
MOST_WATTS, MOST_WATTS_LAPTOP = 1.5, 2.5  # of the data sheet's power limit
WATTS_OVER_LIMIT = 1.15  # readings may exceed the limit for moments
SLOWEST_STEP = 1e-3  # of the rate of products; a small model that waits for its host reaches a hundredth
FIRST_DATE = datetime.date(2025, 1, 1)  # before deskside existed
MIN_WEIGHT_BYTES = 2  # of a parameter in memory
DAY = datetime.timedelta(days=1)  # the owner may live east of here


def check_report(report: CardReport, today: datetime.date) -> Gpu:
    """Return the card of a report. Raises UsageError, in one line, if the card is unknown or a value is impossible."""
    gpu = _card(report)
    date = datetime.date.fromisoformat(report.date)
    if not FIRST_DATE <= date <= today + DAY:
        raise UsageError(f"date: {report.date} is {'in the future' if date > today else 'too long ago'}")
    _check_power(report, gpu)
    if report.benchmark is not None:
        _check_rate("benchmark.matmul_flops", report.benchmark.matmul_flops, gpu)
        _check_between(
            "benchmark.copy_bytes_per_second",
            report.benchmark.copy_bytes_per_second / 1e9,
            gpu.bandwidth / 1e9,
            (SLOWEST, FASTEST_MEMORY),
            "GB/s",
        )
    for index, point in enumerate(report.points):
        _check_point(f"points.{index}", point, report, gpu)
    return gpu


def _card(report: CardReport) -> Gpu:
    gpu = find_device(report.card, report.memory_bytes)
    if gpu is not None:
        if gpu.rocm:
            raise UsageError(
                f"card: {gpu.name} is not an NVIDIA card; deskside reads no reports of others yet"
            )
        return gpu
    name = report.card.casefold().removeprefix("nvidia ")
    same = [gpu for gpu in gpus() if name in gpu.device_names.casefold().split("|")]
    if same:
        sizes = " or ".join(gib(gpu.memory_bytes) for gpu in same)
        raise UsageError(f"memory_bytes: {gib(report.memory_bytes)}, but a {report.card} has {sizes}")
    raise UsageError(f"card: {report.card} is not in the table of GPUs (deskside plan --gpu list)")


def _check_power(report: CardReport, gpu: Gpu) -> None:
    most = gpu.watts * (MOST_WATTS_LAPTOP if gpu.laptop else MOST_WATTS)
    limit = report.power_limit_watts
    if limit is not None and limit > most:
        raise UsageError(f"power_limit_watts: {limit:g} W; a {gpu.name} has {gpu.watts:g} W")
    for index, point in enumerate(report.points):
        if point.watts is not None and point.watts > WATTS_OVER_LIMIT * (limit or most):
            raise UsageError(
                f"points.{index}.watts: {point.watts:g} W, above the power limit of {limit or most:g} W"
            )


def _check_point(name: str, point: ReportedPoint, report: CardReport, gpu: Gpu) -> None:
    """Raise UsageError for a run that this card cannot have done."""
    _check_rate(f"{name}.matmul_flops", point.matmul_flops, gpu)
    model, params = point.config, num_params(point.config)
    # Runs below 16 bits are compared with the fastest format of the card, which is generous but never wrong.
    peak = gpu.bf16_flops
    if point.precision not in ("bf16", "fp32"):
        peak = max(gpu.bf16_flops, gpu.fp8_flops or 0, gpu.fp4_flops or 0)
    needed = flops_per_token(model, point.sequence_length) * point.tokens_per_second
    if needed > _fastest(gpu) * peak:
        raise UsageError(
            f"{name}.step_seconds: {needed / 1e12:,.0f} TFLOP/s are beyond the {peak / 1e12:,.0f} of a {gpu.name}"
        )
    if point.precision in ("bf16", "fp32") and needed > STEP_OVER_PRODUCT * point.matmul_flops:
        raise UsageError(
            f"{name}.step_seconds: faster than the large products that were timed before the run"
        )
    if needed < SLOWEST_STEP * point.matmul_flops:
        raise UsageError(
            f"{name}.step_seconds: {point.step_seconds.median:g} s are too long; is the unit right?"
        )
    # Every step reads each weight at least once forward and once backward, and writes it.
    least = 3 * MIN_WEIGHT_BYTES * (params - model.vocab_size * model.hidden_size)
    if least / point.step_seconds.median > FASTEST_MEMORY * gpu.bandwidth:
        raise UsageError(
            f"{name}.step_seconds: too short to read the weights of this model with {gpu.bandwidth / 1e9:,.0f} GB/s"
        )
    if point.launch_seconds is not None and point.launch_seconds > 100 * point.step_seconds.p90:
        raise UsageError(f"{name}.launch_seconds: a hundred times the step that they start")
    for field in ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"):
        if getattr(point, field) > 1.02 * report.memory_bytes:
            raise UsageError(
                f"{name}.{field}: {gib(getattr(point, field))}, more than the card's {gib(report.memory_bytes)}"
            )
    if point.peak_allocated_bytes < MIN_WEIGHT_BYTES * params:
        raise UsageError(
            f"{name}.peak_allocated_bytes: {gib(point.peak_allocated_bytes)} do not hold {params:,} weights"
        )


def _fastest(gpu: Gpu) -> float:
    return FASTEST_LAPTOP if gpu.laptop else FASTEST


def _check_rate(name: str, flops: float, gpu: Gpu) -> None:
    _check_between(name, flops / 1e12, gpu.bf16_flops / 1e12, (SLOWEST, _fastest(gpu)), "TFLOP/s")


def _check_between(name: str, value: float, sheet: float, shares: tuple[float, float], unit: str) -> None:
    """Raise UsageError unless value / sheet lies between the shares."""
    low, high = shares
    if not low * sheet <= value <= high * sheet:
        direction, hint = ("above", "") if value > sheet else ("below", "; is its unit right?")
        raise UsageError(
            f"{name}: {value:,.3g} {unit} is too far {direction} the data sheet's {sheet:,.4g}{hint}"
        )
