"""Energy and money of a number of hours on the card. Every price says whose it is.

A price given by the user is used. Without one, a published price is used and labelled as such, or the cost is left out.
"""

from dataclasses import dataclass
from typing import Any

from deskside.budget.energy import Energy, Watts, cap_table, energy, gpu_watts, wall_watts
from deskside.budget.money import Ownership, OwnOrRent, electricity_cost, own_or_rent, rent_cost
from deskside.facts import prices
from deskside.plan.estimate import Range
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
    """Cost of a number of hours. of: what takes the hours; wall, energy, electricity, rent, own: None where nothing is
    known, and notes give the reason."""

    of: str
    hours: Range
    card_watts: Watts | None
    wall: Watts | None
    energy: Energy | None
    electricity: Money | None
    rent: Money | None
    own: OwnOrRent | None
    own_basis: str
    caps: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "of": self.of,
            "hours": {"low": self.hours[0], "expected": self.hours[1], "high": self.hours[2]},
            "kwh": None,
            "electricity": None if self.electricity is None else self.electricity.to_json(),
            "rent": None if self.rent is None else self.rent.to_json(),
            "own": None,
            "power_limits": list(self.caps),
            "notes": list(self.notes),
        }
        if self.energy is not None and self.wall is not None:
            result["kwh"] = {
                "low": round(self.energy.low, 3),
                "expected": round(self.energy.expected, 3),
                "high": round(self.energy.high, 3),
                "wall_watts": round(self.wall.expected),
                "source": self.energy.source,
                "basis": self.wall.basis,
            }
        if self.own is not None:
            result["own"] = {
                "usd_per_hour": round(self.own.own_per_hour, 4),
                "break_even_hours": self.own.break_even_hours,
                "within_life": self.own.within_life,
                "words": self.own.words,
                "source": self.own_basis,
            }
        return result


def cost(request: PlanRequest, seconds: Range, of: str) -> Cost:
    """Return the energy and cost of `seconds` on all GPUs of the request."""
    hours = (seconds[0] / 3600, seconds[1] / 3600, seconds[2] / 3600)
    gpu, notes = request.card.gpu, []
    card_watts = wall = used = None
    if gpu is not None:
        machine = request.card.machine
        card_watts = gpu_watts(gpu, machine.power_limit_watts if machine else None, request.measured_watts)
        wall = wall_watts(card_watts, request.gpus)
        low, high = energy(wall, hours[0]), energy(wall, hours[2])
        expected = energy(wall, hours[1])
        used = Energy(low.low, expected.expected, high.high, expected.source, expected.basis)
    else:
        notes.append(f"energy is left out: nothing is known about the power of {request.card.name}")
    electricity = _electricity(request, used, notes)
    rent = _rent(request, hours, notes)
    own, basis = _own(request, wall, electricity, rent)
    return Cost(
        of, hours, card_watts, wall, used, electricity, rent, own, basis, _caps(request, used), tuple(notes)
    )


def _electricity(request: PlanRequest, used: Energy | None, notes: list[str]) -> Money | None:
    if used is None:
        return None
    if request.price_kwh is not None:
        price, source = request.price_kwh, "given"
    else:
        anchor = prices.electricity()[0]
        price, source = anchor.usd, anchor.label
        notes.append(
            "no --price-kwh was given: the cost of electricity is at a published price, not at yours"
        )
    low, expected, high = (electricity_cost(kwh, price) for kwh in (used.low, used.expected, used.high))
    return Money((low, expected, high), price, source)


def _rent(request: PlanRequest, hours: Range, notes: list[str]) -> Money | None:
    if request.rent_per_hour is not None:
        price, source = request.rent_per_hour, "given"
    else:
        anchor = None if request.card.gpu is None else prices.rent(request.card.gpu)
        if anchor is None:
            notes.append("renting is left out: no price of this card is known; give --rent-per-hour")
            return None
        price, source = anchor.usd, anchor.label
        notes.append("no --rent-per-hour was given: renting is at a published price")
    low, expected, high = (rent_cost(h, request.gpus, price) for h in hours)
    return Money((low, expected, high), price, source)


def _own(
    request: PlanRequest, wall: Watts | None, electricity: Money | None, rent: Money | None
) -> tuple[OwnOrRent | None, str]:
    gpu = request.card.gpu
    if gpu is None or gpu.msrp_usd is None or wall is None or electricity is None or rent is None:
        return None, ""
    card = Ownership(gpu.msrp_usd)
    basis = (
        f"published price of ${gpu.msrp_usd:,.0f} and nothing for it afterwards; electricity and rent as above; "
        f"{card.life_hours:,.0f} hours of use assumed"
    )
    return own_or_rent(request.gpus, card, wall.expected, electricity.price, rent.price), basis


def _caps(request: PlanRequest, used: Energy | None) -> tuple[dict[str, Any], ...]:
    """Return the lower power limits that were measured on this card: slower, but with less energy."""
    if request.card.gpu is None or used is None:
        return ()
    return tuple(
        {
            "watts": point.limit_watts,
            "speed": round(point.speed_share, 3),
            "card_energy_per_token": round(point.energy_share, 3),
            "of": point.workload,
            "source": f"{'interpolated between' if point.interpolated else 'published'} {point.date}: {point.source}",
        }
        for point in cap_table(request.card.gpu)
    )
