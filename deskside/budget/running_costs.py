"""Power, energy, the effect of a lower power limit on speed, and the cost of owning a card against renting one.

    wall watts  = (GPUs x watts of one GPU + watts of the host) / efficiency of the power supply
    kWh         = wall watts x hours / 1000
    owning      = price / hours of its life + wall kW x price of a kWh                       (per hour)
    break-even  = price / (rent per hour - electricity per hour)                             (hours)

The watts of a card are measured if a probe has stored their average, else computed from its power limit and the share
of this limit that training draws (`facts/power.toml`, with sources). Both have a range, and so does the energy.

The effect of a power limit is interpolated linearly between published measurements of the same card, and never
extrapolated: at some limit below the lowest published one, speed drops steeply.

Of the computer around a card, only the electricity counts, not the price: most buyers of a card have a computer.
"""

import bisect
from dataclasses import dataclass
from typing import Literal

from deskside.facts import power_and_prices as facts
from deskside.facts.gpus import Gpu

MEASURED_SPREAD = 0.03  # as a share: how much a run's watts may differ from those of a probe on the same card
LIFE_HOURS = 3 * 365 * 24 * 0.5  # three years, computing half of the time: assumed, and shown to the user


@dataclass(frozen=True)
class Watts:
    """Average power in watts, with its range. basis: one line about what it was computed from."""

    low: float
    expected: float
    high: float
    source: Literal["measured", "modelled"]
    basis: str


@dataclass(frozen=True)
class CapPoint:
    """Speed and power of a card at a lower power limit, relative to the same card at its data sheet's limit.

    interpolated: True if the values were interpolated between two measured limits; training: True if training was
    measured, False for inference, which often loses less speed.
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
        """Energy per token, relative to the card at its full limit."""
        return self.power_share / self.speed_share


@dataclass(frozen=True)
class OwnOrRent:
    """Cost of owning and of renting, per hour of the run with all its cards.

    break_even_hours: hours of use after which owning is cheaper; None if never, because the electricity alone costs at
    least as much as renting. within_life: True if these hours are within the cards' life.
    """

    own_per_hour: float
    electricity_per_hour: float
    rent_per_hour: float
    break_even_hours: float | None
    within_life: bool

    @property
    def summary(self) -> str:
        """The comparison as one line of text."""
        if self.break_even_hours is None:
            return "owning never pays: its electricity costs as much as renting"
        end = "of use" if self.within_life else "which is beyond the life of the card"
        comma = "" if self.within_life else ","
        return f"owning pays after {self.break_even_hours:,.0f} hours{comma} {end}"


def gpu_watts(gpu: Gpu, limit_watts: float | None = None, measured_watts: float | None = None) -> Watts:
    """Return the average draw of one card in training.

    limit_watts: the configured power limit; default: that of the data sheet. measured_watts: the average of a probe on
    this card at this limit. It takes precedence.
    """
    if measured_watts is not None:
        spread = measured_watts * MEASURED_SPREAD
        basis = f"{measured_watts:.0f} W on average in the probe"
        return Watts(measured_watts - spread, measured_watts, measured_watts + spread, "measured", basis)
    limit = gpu.watts if limit_watts is None else limit_watts
    share = facts.training_load(gpu)
    basis = f"{share.expected:.0%} of the limit of {limit:.0f} W ({share.source})"
    return Watts(share.low * limit, share.expected * limit, share.high * limit, "modelled", basis)


def wall_watts(card: Watts, gpus: int = 1) -> Watts:
    """Return the power at the wall of a computer with `gpus` such cards."""
    host, supply = facts.host_watts(), facts.supply_efficiency()
    return Watts(
        (gpus * card.low + host.low) / supply.low,
        (gpus * card.expected + host.expected) / supply.expected,
        (gpus * card.high + host.high) / supply.high,
        "modelled",
        f"({gpus} x {card.expected:.0f} W + {host.expected:.0f} W host, {host.source}) / "
        f"{supply.expected:.2f}, {supply.source}",
    )


def kilowatt_hours(wall: Watts, low: float, expected: float, high: float) -> tuple[float, float, float]:
    """Return the (low, expected, high) kWh at the wall of a run of `low` to `high` hours."""
    return wall.low * low / 1000, wall.expected * expected / 1000, wall.high * high / 1000


def cap_table(gpu: Gpu) -> list[CapPoint]:
    """Return the published power limits below the data sheet's for this card, highest first.

    Where the ranges of two publications overlap, the earlier in the list counts; those about training come first.
    """
    published = [series for series in facts.cap_series(gpu) if _covers(series, gpu.watts)]
    table = [
        _point(series, gpu, limit)
        for index, series in enumerate(published)
        for limit, _, _ in series.points
        if limit < gpu.watts and not any(_covers(earlier, limit) for earlier in published[:index])
    ]
    return sorted(table, key=lambda point: -point.limit_watts)


def _covers(series: facts.CapSeries, limit: float) -> bool:
    return series.points[0][0] <= limit <= series.points[-1][0]


def _point(series: facts.CapSeries, gpu: Gpu, limit: float) -> CapPoint:
    """Return a series at `limit`, relative to the data sheet's limit; the measured card may have had another limit."""
    speed, watts = _interpolated(series, limit)
    full_speed, full_watts = _interpolated(series, gpu.watts)
    return CapPoint(
        limit_watts=limit,
        speed_share=speed / full_speed,
        power_share=watts / full_watts,
        interpolated=not {limit, gpu.watts} <= {point_limit for point_limit, _, _ in series.points},
        training=series.training,
        workload=series.workload,
        date=series.date,
        source=series.source,
    )


def _interpolated(series: facts.CapSeries, limit: float) -> tuple[float, float]:
    """Return (speed share, watts drawn) of a series at a limit that it covers."""
    above = bisect.bisect_left(series.points, limit, key=lambda point: point[0])
    (low, low_speed, low_watts), (high, high_speed, high_watts) = (
        series.points[max(above - 1, 0)],
        series.points[above],
    )
    part = 0.0 if low == high else (limit - low) / (high - low)
    return low_speed + part * (high_speed - low_speed), low_watts + part * (high_watts - low_watts)


def own_or_rent(
    gpus: int,
    price: float,
    wall_watts: float,
    per_kwh: float,
    rent_per_gpu_hour: float,
    life_hours: float = LIFE_HOURS,
) -> OwnOrRent:
    """Compare buying `gpus` cards at `price` each with renting them.

    wall_watts: power of the whole computer with its cards while it trains; per_kwh: price of a kWh; life_hours: hours
    of use until a card is worth nothing.
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
    """Return the cost of a billion tokens from the cost per hour."""
    return per_hour * 1e9 / tokens_per_second / 3600
