"""What power, electricity, rents and prices answer of claims."""

from collections.abc import Callable

from deskside.budget.energy import energy, gpu_watts, wall_watts
from deskside.budget.money import Ownership, own_or_rent, per_billion_tokens
from deskside.facts import gpus, prices
from deskside.study.claims.answers import Answer, Formula, exact, ranged

CLAIMED_PRICE = 0.10  # dollars per kWh, as the guide reckons
CLAIMED_CLUSTER_SPEED = 1.3e6  # tokens/s of its eight cards, as the guide reckons with
GPT2_TOKENS = 49e9


def _cluster(scale: float, on: str) -> Answer:
    """Of the wall's watts with eight cards."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), 8)
    return ranged((wall.low, wall.expected, wall.high), scale, on)


def _cluster_kilowatts() -> Answer:
    return _cluster(1e-3, "8 x RTX 5090 with their host")


def _dollars(hours: float, cards: int = 8, longest: float | None = None) -> Answer:
    """Electricity of so many hours, `longest` hours at most, at the documents' price."""
    wall = wall_watts(gpu_watts(gpus.find("rtx5090")), cards)
    used = energy(wall, hours), energy(wall, hours if longest is None else longest)
    kwh = (used[0].low, (used[0].expected + used[1].expected) / 2, used[1].high)
    return ranged(kwh, CLAIMED_PRICE, f"{cards} x RTX 5090, $0.10 per kWh")


def _hours(tokens: float, tokens_per_second: float = CLAIMED_CLUSTER_SPEED) -> float:
    return tokens / tokens_per_second / 3600


def _cost_of_49b() -> Answer:
    return _dollars(_hours(GPT2_TOKENS))


def _total_cost() -> Answer:
    """The guide's whole road: 10.5 hours of eight cards, one of SFT and two to three of DPO on one card."""
    parts = _dollars(_hours(GPT2_TOKENS)), _dollars(1.0, 1), _dollars(2.0, 1, 3.0)
    low, value, high = (sum(ends) for ends in zip(*((p.low, p.value, p.high) for p in parts), strict=True))
    return Answer(low, value, high, "modelled", "10.5 h of 8 x RTX 5090, 3 to 4 h of one, $0.10 per kWh")


def _cost_per_billion() -> Answer:
    return _dollars(_hours(1e9))


def _rented_per_billion(dollars: float, tokens_per_second: float) -> Callable[[], Answer]:
    on = f"${dollars} per hour, {tokens_per_second:,.0f} tokens/s"
    return lambda: exact(per_billion_tokens(dollars, tokens_per_second), on=on)


def _rent_against_own(
    dollars: float, tokens_per_second: float, inverse: bool = False
) -> Callable[[], Answer]:
    """Rent per billion tokens as a multiple of one's own electricity; inverse: electricity in per cent of rent."""

    def formula() -> Answer:
        rented, own = per_billion_tokens(dollars, tokens_per_second), _cost_per_billion()
        on = f"${dollars} per hour, {tokens_per_second:,.0f} tokens/s; electricity alone"
        if inverse:
            return ranged((own.low, own.value, own.high), 100 / rented, on)
        return Answer(rented / own.high, rented / own.value, rented / own.low, "modelled", on)

    return formula


def _break_even_hours() -> Answer:
    def hours(rent: float) -> float:
        found = own_or_rent(8, Ownership(2000.0), 3600.0, CLAIMED_PRICE, rent / 8).break_even_hours
        assert found is not None  # such rents are far above electricity
        return found

    return Answer(hours(50), hours(40), hours(30), "arithmetic", "$16,000, $30 to $50 per hour")


def _rent(card: str) -> Callable[[], Answer]:
    def formula() -> Answer:
        gpu = gpus.find(card)
        offers, first = [price.usd for price in prices.rents(gpu)], prices.rent(gpu)
        assert first is not None  # facts/prices.toml has this card
        return Answer(min(offers), first.usd, max(offers), "published prices", f"{gpu.name}, {first.date}")

    return formula


def _cluster_rent() -> Answer:
    """What as many A100 as eight RTX 5090 equal cost, by the speeds and the rent that the documents give."""
    return exact(CLAIMED_CLUSTER_SPEED / 188_000 * 0.79, on="1.3M tokens/s, 188,000 per A100, $0.79 per hour")


MONEY: dict[str, Formula] = {
    "cluster_kilowatts": _cluster_kilowatts,
    "cluster_dollars_per_hour": lambda: _dollars(1.0),
    "cost_of_49b": _cost_of_49b,
    "cost_of_sft": lambda: _dollars(1.0, 1),
    "cost_of_dpo": lambda: _dollars(2.0, 1, 3.0),
    "total_cost": _total_cost,
    "cost_per_billion": _cost_per_billion,
    "cost_per_billion_a100": _rented_per_billion(0.79, 188_000),
    "cost_per_billion_h100": _rented_per_billion(2.49, 280_000),
    "a100_rent_against_own": _rent_against_own(0.79, 188_000),
    "h100_rent_against_own": _rent_against_own(2.49, 280_000),
    "own_share_of_a100_rent": _rent_against_own(0.79, 188_000, inverse=True),
    "break_even_hours": _break_even_hours,
    "cluster_rent": _cluster_rent,
    "rent_rtx5090": _rent("rtx5090"),
    "rent_rtx4090": _rent("rtx4090"),
    "rent_a100": _rent("a100 80gb sxm"),
    "rent_h100": _rent("h100 sxm"),
}
