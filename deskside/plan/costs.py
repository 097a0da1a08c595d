"""Energy and money of a number of hours on the card. Every price says whose it is.

A price given by the user is used. Without one, a published price is used and labelled as such, or the cost is left out.
"""

from dataclasses import dataclass
from typing import Any

from deskside.budget.running_costs import (
    LIFE_HOURS,
    OwnOrRent,
    Watts,
    cap_table,
    gpu_watts,
    kilowatt_hours,
    own_or_rent,
    wall_watts,
)
from deskside.facts.power_and_prices import electricity_prices, rental_prices
from deskside.plan.estimate import Range, range_json
from deskside.plan.request import PlanRequest


@dataclass(frozen=True)
class Money:
    """An amount with its range, its price, and the source of the price ("given", or the label of a published one)."""

    amount: Range
    price: float
    source: str

    def to_json(self) -> dict[str, Any]:
        low, expected, high = (round(value, 4) for value in self.amount)
        return {"usd": expected, "low": low, "high": high, "price": self.price, "source": self.source}


@dataclass(frozen=True)
class Cost:
    """Cost of a number of hours. of: what takes the hours; wall, kwh, electricity, rent, own: None where nothing is
    known, and notes give the reason."""

    of: str
    hours: Range
    wall: Watts | None
    kwh: Range | None
    electricity: Money | None
    rent: Money | None
    own: OwnOrRent | None
    own_basis: str
    caps: list[dict[str, Any]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "of": self.of,
            "hours": range_json(self.hours),
            "kwh": None,
            "electricity": self.electricity and self.electricity.to_json(),
            "rent": self.rent and self.rent.to_json(),
            "own": None,
            "power_limits": self.caps,
            "notes": self.notes,
        }
        if self.kwh is not None and self.wall is not None:
            result["kwh"] = {
                **{end: round(kwh, 3) for end, kwh in range_json(self.kwh).items()},
                "wall_watts": round(self.wall.expected),
                "source": self.wall.source,
                "basis": self.wall.basis,
            }
        if self.own is not None:
            result["own"] = {
                "usd_per_hour": round(self.own.own_per_hour, 4),
                "break_even_hours": self.own.break_even_hours,
                "within_life": self.own.within_life,
                "words": self.own.summary,
                "source": self.own_basis,
            }
        return result


def cost(request: PlanRequest, seconds: Range, of: str) -> Cost:
    """Return the energy and cost of `seconds` on all GPUs of the request."""
    low, expected, high = (value / 3600 for value in seconds)
    gpu, notes = request.card.gpu, []
    wall = kwh = power = own = None
    basis, caps = "", []
    if gpu is None:
        notes.append(f"energy is left out: nothing is known about the power of {request.card.name}")
    else:
        machine = request.card.machine
        one = gpu_watts(gpu, machine.power_limit_watts if machine else None, request.measured_watts)
        wall = wall_watts(one, request.gpus)
        kwh = kilowatt_hours(wall, low, expected, high)
        price, source = request.price_kwh, "given"
        if price is None:
            price, source = electricity_prices()[0].usd, electricity_prices()[0].label
            notes.append(
                "no --price-kwh was given: the cost of electricity is at a published price, not at yours"
            )
        power = Money((kwh[0] * price, kwh[1] * price, kwh[2] * price), price, source)
        caps = [
            {
                "watts": point.limit_watts,
                "speed": round(point.speed_share, 3),
                "card_energy_per_token": round(point.energy_share, 3),
                "of": point.workload,
                "source": f"{'interpolated between' if point.interpolated else 'published'} {point.date}: "
                f"{point.source}",
            }
            for point in cap_table(gpu)
        ]
    rent = _rent(request, (low, expected, high), notes)
    if (
        gpu is not None
        and gpu.msrp_usd is not None
        and wall is not None
        and power is not None
        and rent is not None
    ):
        basis = (
            f"published price of ${gpu.msrp_usd:,.0f} and nothing for it afterwards; electricity and rent as above; "
            f"{LIFE_HOURS:,.0f} hours of use assumed"
        )
        own = own_or_rent(request.gpus, gpu.msrp_usd, wall.expected, power.price, rent.price)
    return Cost(of, (low, expected, high), wall, kwh, power, rent, own, basis, caps, notes)


def _rent(request: PlanRequest, hours: Range, notes: list[str]) -> Money | None:
    price, source = request.rent_per_hour, "given"
    if price is None:
        offers = [] if request.card.gpu is None else rental_prices(request.card.gpu)
        if not offers:
            notes.append("renting is left out: no price of this card is known; give --rent-per-hour")
            return None
        price, source = offers[0].usd, offers[0].label
        notes.append("no --rent-per-hour was given: renting is at a published price")
    low, expected, high = (h * request.gpus * price for h in hours)
    return Money((low, expected, high), price, source)
