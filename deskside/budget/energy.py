"""Watts, kilowatt-hours, and what a lower power limit costs in speed.

    wall watts = (GPUs x watts of one + host) / efficiency of the power supply
    kWh        = wall watts x hours / 1000

The watts of a card come from a measurement when there is one (a probe keeps the average), else from its power limit
and the share of it that training draws (`facts/power.toml`, with sources). Both have a range, and so has the answer.

A power limit is only answered between points that somebody measured on the same card, by straight lines between
them. Below the lowest point the speed drops steeply at a limit that was not published, so there is no answer there.
"""

import bisect
import math
from dataclasses import dataclass
from typing import Literal

from deskside.facts import power
from deskside.facts.gpus import Gpu
from deskside.utils.errors import UsageError

MEASURED_SPREAD = 0.03  # watts of a later run against those of a probe on the same card


@dataclass(frozen=True)
class _Figure:
    """A number with its range. source: how it is known; basis: one line on what it was computed from."""

    low: float
    expected: float
    high: float
    source: Literal["measured", "modelled", "published"]
    basis: str


class Watts(_Figure):
    """Average power."""


class Energy(_Figure):
    """Kilowatt-hours at the wall."""


@dataclass(frozen=True)
class CapPoint:
    """A card at a lower power limit. Shares are of the same card at its data sheet's limit.

    interpolated: between two measured limits. training: the speeds are of training; inference often loses less.
    """

    limit_watts: float
    speed_share: float
    power_share: float
    interpolated: bool
    training: bool
    workload: str
    date: str
    source: str

    @property
    def energy_share(self) -> float:
        """Energy per token against the card at its full limit."""
        return self.power_share / self.speed_share


def gpu_watts(gpu: Gpu, limit_watts: float | None = None, measured_watts: float | None = None) -> Watts:
    """Return the average draw of one card in training.

    limit_watts: the limit that is set, the data sheet's without one. measured_watts: the average of a probe on this
    card under this limit; it decides when it is given. Raises UsageError for watts that cannot be.
    """
    if measured_watts is not None:
        _positive("measured watts", measured_watts)
        spread = measured_watts * MEASURED_SPREAD
        basis = f"{measured_watts:.0f} W on average in the probe"
        return Watts(measured_watts - spread, measured_watts, measured_watts + spread, "measured", basis)
    limit = gpu.watts if limit_watts is None else limit_watts
    _positive("power limit", limit)
    share = power.load(gpu)
    basis = f"{share.expected:.0%} of the limit of {limit:.0f} W ({share.source})"
    return Watts(share.low * limit, share.expected * limit, share.high * limit, "modelled", basis)


def wall_watts(one: Watts, gpus: int = 1, host_watts: float | None = None) -> Watts:
    """Return the power at the wall of a computer with `gpus` such cards.

    host_watts: power without the cards, if known. Raises UsageError for an impossible count or power.
    """
    if gpus < 1:
        raise UsageError(f"gpus: {gpus} must be at least 1")
    host = power.host()
    if host_watts is not None:
        _positive("host watts", host_watts)
        host = power.Share(host_watts, host_watts, host_watts, "given")
    supply = power.supply_efficiency()
    basis = (
        f"({gpus} x {one.expected:.0f} W + {host.expected:.0f} W host, {host.source}) / "
        f"{supply.expected:.2f}, {supply.source}"
    )
    return Watts(
        (gpus * one.low + host.low) / supply.low,
        (gpus * one.expected + host.expected) / supply.expected,
        (gpus * one.high + host.high) / supply.high,
        "modelled",
        basis,
    )


def energy(wall: Watts, hours: float) -> Energy:
    """Return kilowatt-hours of `hours` at these wall watts. Raises UsageError for hours that cannot be."""
    _not_negative("hours", hours)
    basis = f"{wall.expected:.0f} W at the wall x {hours:.2f} h"
    low, expected, high = (watts * hours / 1000 for watts in (wall.low, wall.expected, wall.high))
    return Energy(low, expected, high, wall.source, basis)


def cap_table(gpu: Gpu) -> tuple[CapPoint, ...]:
    """Return every power limit below the data sheet's at which this very card was measured, highest first. Where two
    publications overlap, the first that was about training speaks, as in `at_limit`. Empty: nobody published one."""
    known = [series for series in power.cap_series(gpu) if _covers(series, gpu.watts)]
    table = [
        _point(series, gpu, limit)
        for place, series in enumerate(known)
        for limit, _, _ in series.points
        if limit < gpu.watts and not any(_covers(earlier, limit) for earlier in known[:place])
    ]
    return tuple(sorted(table, key=lambda point: -point.limit_watts))


def at_limit(gpu: Gpu, limit_watts: float) -> CapPoint:
    """Speed and power of this card at `limit_watts`, between limits that were measured on the same card.

    Raises UsageError outside of them, above the data sheet's limit, and for a card of which nothing was published.
    """
    _positive("power limit", limit_watts)
    if limit_watts > gpu.watts:
        raise UsageError(
            f"power limit: {limit_watts:.0f} W is above the {gpu.watts:.0f} W of the {gpu.name}; give less"
        )
    known = [series for series in power.cap_series(gpu) if _covers(series, gpu.watts)]
    if not known:
        raise UsageError(
            f"power limit: nobody published what the {gpu.name} does at a lower one; measure it with `deskside probe`"
        )
    for series in known:
        if _covers(series, limit_watts):
            return _point(series, gpu, limit_watts)
    lowest = min(series.points[0][0] for series in known)
    raise UsageError(
        f"power limit: {limit_watts:.0f} W is below the lowest that was measured on the {gpu.name} "
        f"({lowest:.0f} W); measure it with `deskside probe`"
    )


def _covers(series: power.CapSeries, limit: float) -> bool:
    return series.points[0][0] <= limit <= series.points[-1][0]


def _point(series: power.CapSeries, gpu: Gpu, limit: float) -> CapPoint:
    """Against the data sheet's limit: the card that was measured may have had another one."""
    speed, draw = _at(series, limit)
    full_speed, full_draw = _at(series, gpu.watts)
    measured = {watts for watts, _, _ in series.points}
    return CapPoint(
        limit_watts=limit,
        speed_share=speed / full_speed,
        power_share=draw / full_draw,
        interpolated=not {limit, gpu.watts} <= measured,
        training=series.training,
        workload=series.workload,
        date=series.date,
        source=series.source,
    )


def _at(series: power.CapSeries, limit: float) -> tuple[float, float]:
    """Return (speed share, draw in watts) of a series at a limit that it covers; a draw that was not published is taken
    to be the limit, which matrix products on GeForce cards reach (`power.load`)."""
    limits = [point[0] for point in series.points]
    above = bisect.bisect_left(limits, limit)
    right = series.points[above]
    left = series.points[max(above - 1, 0)]
    part = 0.0 if left[0] == right[0] else (limit - left[0]) / (right[0] - left[0])
    speed = left[1] + part * (right[1] - left[1])
    left_draw, right_draw = left[2] or left[0], right[2] or right[0]
    return speed, left_draw + part * (right_draw - left_draw)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name}: {value:g} must be a number above 0")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{name}: {value:g} must be a number that is not negative")
