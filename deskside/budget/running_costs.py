"""Watts, kilowatt-hours, what a lower power limit costs in speed, and whether owning a card is cheaper than renting.

    wall watts  = (GPUs x watts of one + host) / efficiency of the power supply
    kWh         = wall watts x hours / 1000
    owning      = price / hours of its life + wall kW x price of a kWh                       per hour
    break-even  = price / (price of renting per hour - electricity per hour)

The watts of a card come from a measurement when there is one (a probe keeps the average), else from its power limit
and the share of it that training draws (`facts/power.toml`, with sources). Both have a range, and so has the answer.

A power limit is only answered between points that somebody measured on the same card, by straight lines between
them. Below the lowest point the speed drops steeply at a limit that was not published, so there is no answer there.

The computer around a card counts with its electricity only: who buys a card mostly has one.
"""

import bisect
from dataclasses import dataclass
from typing import Literal

from deskside.facts import power_and_prices as facts
from deskside.facts.gpus import Gpu

MEASURED_SPREAD = 0.03  # watts of a later run against those of a probe on the same card
LIFE_HOURS = 3 * 365 * 24 * 0.5  # three years, half of the time computing: an assumption, to be shown


@dataclass(frozen=True)
class Watts:
    """Average power with its range. source: how it is known; basis: one line on what it was computed from."""

    low: float
    expected: float
    high: float
    source: Literal["measured", "modelled"]
    basis: str


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


@dataclass(frozen=True)
class OwnOrRent:
    """Owning against renting, per hour of the run and all its cards.

    break_even_hours: of use, after which owning is cheaper; None: never, because its electricity alone costs as much as
    renting. within_life: that this is before the end of the cards' life; False when never.
    """

    own_per_hour: float
    electricity_per_hour: float
    rent_per_hour: float
    break_even_hours: float | None
    within_life: bool

    @property
    def words(self) -> str:
        """The comparison as one line of text."""
        if self.break_even_hours is None:
            return "owning never pays: its electricity costs as much as renting"
        end = "of use" if self.within_life else "which is beyond the life of the card"
        comma = "" if self.within_life else ","
        return f"owning pays after {self.break_even_hours:,.0f} hours{comma} {end}"


def gpu_watts(gpu: Gpu, limit_watts: float | None = None, measured_watts: float | None = None) -> Watts:
    """Return the average draw of one card in training.

    limit_watts: the limit that is set, the data sheet's without one. measured_watts: the average of a probe on this
    card under this limit; it decides when it is given.
    """
    if measured_watts is not None:
        spread = measured_watts * MEASURED_SPREAD
        basis = f"{measured_watts:.0f} W on average in the probe"
        return Watts(measured_watts - spread, measured_watts, measured_watts + spread, "measured", basis)
    limit = gpu.watts if limit_watts is None else limit_watts
    share = facts.training_load(gpu)
    basis = f"{share.expected:.0%} of the limit of {limit:.0f} W ({share.source})"
    return Watts(share.low * limit, share.expected * limit, share.high * limit, "modelled", basis)


def wall_watts(one: Watts, gpus: int = 1) -> Watts:
    """Return the power at the wall of a computer with `gpus` such cards."""
    host, supply = facts.host_watts(), facts.supply_efficiency()
    return Watts(
        (gpus * one.low + host.low) / supply.low,
        (gpus * one.expected + host.expected) / supply.expected,
        (gpus * one.high + host.high) / supply.high,
        "modelled",
        f"({gpus} x {one.expected:.0f} W + {host.expected:.0f} W host, {host.source}) / "
        f"{supply.expected:.2f}, {supply.source}",
    )


def kilowatt_hours(wall: Watts, low: float, expected: float, high: float) -> tuple[float, float, float]:
    """Return the (low, expected, high) kWh at the wall of a run of `low` to `high` hours."""
    return wall.low * low / 1000, wall.expected * expected / 1000, wall.high * high / 1000


def cap_table(gpu: Gpu) -> list[CapPoint]:
    """Return every power limit below the data sheet's at which this very card was measured, highest first. Where two
    publications overlap, the first that was about training counts."""
    known = [series for series in facts.cap_series(gpu) if _covers(series, gpu.watts)]
    table = [
        _point(series, gpu, limit)
        for place, series in enumerate(known)
        for limit, _, _ in series.points
        if limit < gpu.watts and not any(_covers(earlier, limit) for earlier in known[:place])
    ]
    return sorted(table, key=lambda point: -point.limit_watts)


def _covers(series: facts.CapSeries, limit: float) -> bool:
    return series.points[0][0] <= limit <= series.points[-1][0]


def _point(series: facts.CapSeries, gpu: Gpu, limit: float) -> CapPoint:
    """Against the data sheet's limit: the card that was measured may have had another one."""
    speed, draw = _at(series, limit)
    full_speed, full_draw = _at(series, gpu.watts)
    return CapPoint(
        limit_watts=limit,
        speed_share=speed / full_speed,
        power_share=draw / full_draw,
        interpolated=not {limit, gpu.watts} <= {watts for watts, _, _ in series.points},
        training=series.training,
        workload=series.workload,
        date=series.date,
        source=series.source,
    )


def _at(series: facts.CapSeries, limit: float) -> tuple[float, float]:
    """Return (speed share, draw in watts) of a series at a limit that it covers."""
    above = bisect.bisect_left(series.points, limit, key=lambda point: point[0])
    right, left = series.points[above], series.points[max(above - 1, 0)]
    part = 0.0 if left[0] == right[0] else (limit - left[0]) / (right[0] - left[0])
    return left[1] + part * (right[1] - left[1]), left[2] + part * (right[2] - left[2])


def own_or_rent(
    gpus: int,
    price: float,
    wall_watts: float,
    per_kwh: float,
    rent_per_gpu_hour: float,
    life_hours: float = LIFE_HOURS,
) -> OwnOrRent:
    """Compare buying `gpus` cards at `price` each with renting them.

    wall_watts: of the whole computer with its cards, while it computes; life_hours: of use, after which a card is worth
    nothing.
    """
    electricity = wall_watts / 1000 * per_kwh
    rent = gpus * rent_per_gpu_hour
    hours = gpus * price / (rent - electricity) if rent > electricity else None
    return OwnOrRent(
        own_per_hour=gpus * (price / life_hours) + electricity,
        electricity_per_hour=electricity,
        rent_per_hour=rent,
        break_even_hours=hours,
        within_life=hours is not None and hours <= life_hours,
    )


def per_billion_tokens(per_hour: float, tokens_per_second: float) -> float:
    """Return the cost of a billion tokens."""
    return per_hour * 1e9 / tokens_per_second / 3600
