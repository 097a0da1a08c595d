"""Cost of a run: electricity, renting, owning, and the hours of use after which a bought card has paid for itself.

    electricity = kWh x price
    renting     = GPUs x hours x price of a GPU-hour
    owning      = hours x ((price - resale) / hours of its life + wall kW x price of a kWh)
    break-even  = (price - resale) / (price of renting per hour - electricity per hour)

US dollars or any other currency, as long as it is one. The computer around the card counts with its electricity only:
who buys a card mostly has one. Break-even is None when owning never wins, because the electricity alone costs as much
as renting.
"""

import math
from dataclasses import dataclass

from deskside.utils.errors import UsageError


@dataclass(frozen=True)
class Ownership:
    """A bought card: its price, resale value and hours of use in its life. Raises UsageError for impossible values."""

    price: float
    resale: float = 0.0
    life_hours: float = (
        3 * 365 * 24 * 0.5
    )  # three years, half of the time computing: an assumption, to be shown

    def __post_init__(self) -> None:
        _check("price", self.price)
        _check("resale", self.resale)
        if self.resale > self.price:
            raise UsageError(f"resale: {self.resale:g} is more than the price of {self.price:g}")
        if not (math.isfinite(self.life_hours) and self.life_hours > 0):
            raise UsageError(f"life hours: {self.life_hours:g} must be above 0")

    @property
    def loss(self) -> float:
        """The value lost at the end of its life."""
        return self.price - self.resale

    @property
    def per_hour(self) -> float:
        """Cost per hour of one card, without electricity."""
        return self.loss / self.life_hours


@dataclass(frozen=True)
class OwnOrRent:
    """Owning against renting, per hour of the run and all its cards.

    break_even_hours: of use, after which owning is cheaper; None: never. within_life: that this is before the end of
    the cards' life; False when never.
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
        if not self.within_life:
            return (
                f"owning pays after {self.break_even_hours:,.0f} hours, which is beyond the life of the card"
            )
        return f"owning pays after {self.break_even_hours:,.0f} hours of use"


def electricity_cost(kwh: float, per_kwh: float) -> float:
    """Return the price of electricity. Raises UsageError for a negative or impossible number."""
    _check("kWh", kwh)
    _check("price of a kWh", per_kwh)
    return kwh * per_kwh


def rent_cost(hours: float, gpus: int, per_gpu_hour: float) -> float:
    """Return the price of renting. Raises UsageError for a negative or impossible number."""
    _check("hours", hours)
    _check("rent per hour", per_gpu_hour)
    _count(gpus)
    return hours * gpus * per_gpu_hour


def own_or_rent(
    gpus: int, card: Ownership, wall_watts: float, per_kwh: float, rent_per_gpu_hour: float
) -> OwnOrRent:
    """wall_watts: of the whole computer with its `gpus` cards, while it computes. Raises UsageError for an impossible
    number."""
    _count(gpus)
    _check("rent per hour", rent_per_gpu_hour)
    electricity = _electricity_per_hour(wall_watts, per_kwh)
    rent = gpus * rent_per_gpu_hour
    hours = gpus * card.loss / (rent - electricity) if rent > electricity else None
    return OwnOrRent(
        own_per_hour=gpus * card.per_hour + electricity,
        electricity_per_hour=electricity,
        rent_per_hour=rent,
        break_even_hours=hours,
        within_life=hours is not None and hours <= card.life_hours,
    )


def per_billion_tokens(per_hour: float, tokens_per_second: float) -> float:
    """Return the cost of a billion tokens. Raises UsageError for an impossible number."""
    _check("cost per hour", per_hour)
    if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
        raise UsageError(f"tokens per second: {tokens_per_second:g} must be above 0")
    return per_hour * 1e9 / tokens_per_second / 3600


def _electricity_per_hour(wall_watts: float, per_kwh: float) -> float:
    _check("wall watts", wall_watts)
    _check("price of a kWh", per_kwh)
    return wall_watts / 1000 * per_kwh


def _check(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{name}: {value:g} must be a number that is not negative")


def _count(gpus: int) -> None:
    if gpus < 1:
        raise UsageError(f"gpus: {gpus} must be at least 1")
