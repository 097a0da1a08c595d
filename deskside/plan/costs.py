"""Energy and cost of a number of hours on the card.

A price that the user gives takes precedence. Without one, a published price is used, with its source, or the cost is
left out.
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
from deskside.facts.power_and_prices import default_electricity_price, rental_prices
from deskside.plan.estimate import Range, range_json
from deskside.plan.request import PlanRequest


@dataclass(frozen=True)
class Money:
    """An amount in dollars with its range, and the price per unit. source: "given", or that of a published price."""

    amount: Range
    price: float
    source: str

    def to_json(self) -> dict[str, Any]:
        low, expected, high = (round(value, 4) for value in self.amount)
        return {"usd": expected, "low": low, "high": high, "price": self.price, "source": self.source}


@dataclass(frozen=True)
class Cost:
    """Cost of a number of hours.

    of: the activity that takes the hours; wall: power at the wall; own: comparison with buying; caps: the card at lower
    power limits, as in the JSON; notes: where published prices are used, and why energy or rent is unknown (None).
    """

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
    """Return the energy and cost of `seconds` on all GPUs of the request. of: the activity that takes them."""
    low, expected, high = (value / 3600 for value in seconds)
    gpu, notes = request.card.gpu, []
    wall = kwh = electricity_cost = own = None
    basis, caps = "", []
    if gpu is None:
        notes.append(f"energy is left out: the power of {request.card.name} is not known")
    else:
        machine = request.card.machine
        card_watts = gpu_watts(gpu, machine.power_limit_watts if machine else None, request.measured_watts)
        wall = wall_watts(card_watts, request.gpus)
        kwh = kilowatt_hours(wall, low, expected, high)
        price, source = request.price_kwh, "given"
        if price is None:
            published = default_electricity_price()
            price, source = published.usd, published.label
            notes.append("no --price-kwh was given: electricity is at a published price")
        electricity_cost = Money((kwh[0] * price, kwh[1] * price, kwh[2] * price), price, source)
        caps = [
            {
                "watts": point.limit_watts,
                "speed": round(point.speed_share, 3),
                "card_energy_per_token": round(point.energy_share, 3),
                "of": point.workload,
                "source": f"{'interpolated from' if point.interpolated else 'published'} {point.date}: "
                f"{point.source}",
            }
            for point in cap_table(gpu)
        ]
    rent = _rent(request, (low, expected, high), notes)
    if (
        gpu is not None
        and gpu.msrp_usd is not None
        and wall is not None
        and electricity_cost is not None
        and rent is not None
    ):
        basis = (
            f"published price of ${gpu.msrp_usd:,.0f}, no resale value; electricity and rent as above; "
            f"{LIFE_HOURS:,.0f} hours of use assumed"
        )
        own = own_or_rent(request.gpus, gpu.msrp_usd, wall.expected, electricity_cost.price, rent.price)
    return Cost(
        of=of,
        hours=(low, expected, high),
        wall=wall,
        kwh=kwh,
        electricity=electricity_cost,
        rent=rent,
        own=own,
        own_basis=basis,
        caps=caps,
        notes=notes,
    )


def _rent(request: PlanRequest, hours: Range, notes: list[str]) -> Money | None:
    """Return the cost of renting, None if no price is known. Adds to `notes`."""
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
