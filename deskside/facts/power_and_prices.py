"""Power draw of cards (`power.toml`) and dated prices of renting and electricity (`prices.toml`).

Prices change within weeks, so a caller that shows one must also show `Price.label` ("published 2026-03: ..."), and must
prefer a price that the user gives.
"""

from dataclasses import dataclass

from deskside.facts.data_files import toml_file
from deskside.facts.gpus import Gpu


@dataclass(frozen=True)
class RangeWithSource:
    """An expected value with its range and source. The functions below state the unit."""

    low: float
    expected: float
    high: float
    source: str


@dataclass(frozen=True)
class CapSeries:
    """Measured speed of one card and one workload at several power limits.

    Attributes:
        training: False for inference, which loses less speed at a lower limit.
        points: (limit in watts, speed as a share of the speed at default_watts, draw in watts), in ascending order of
            limits. If the draw was not published, it is the limit, which matrix products on GeForce cards reach.
    """

    card: str
    workload: str
    training: bool
    default_watts: float
    points: tuple[tuple[float, float, float], ...]
    date: str
    source: str


@dataclass(frozen=True)
class Price:
    """A published price.

    Attributes:
        usd: US dollars per GPU-hour of rent, or per kWh of electricity.
        offer: Provider and terms ("RunPod, on demand"), or the country of an electricity price.
        date: Year, month or day on which it was published.
    """

    usd: float
    offer: str
    date: str
    source: str

    @property
    def label(self) -> str:
        """Date, offer and source, to be shown with the price."""
        return f"published {self.date}: {self.offer}; {self.source}"


def _range(values: list[float], source: str) -> RangeWithSource:
    low, expected, high = values
    return RangeWithSource(low, expected, high, source)


def training_load(gpu: Gpu) -> RangeWithSource:
    """Return the average power draw of this card in training, as a share of its power limit."""
    entries = {entry["kind"]: entry for entry in toml_file("power.toml")["load"]}
    entry = entries["geforce" if gpu.geforce else "other"]
    return _range(entry["share"], entry["source"])


def host_watts() -> RangeWithSource:
    """Return the watts that the computer draws without its cards."""
    entry = toml_file("power.toml")["host"]
    return _range(entry["watts"], entry["source"])


def supply_efficiency() -> RangeWithSource:
    """Return the efficiency of the power supply (power to the components / power at the wall).

    `low` is the best supply, which has the largest efficiency, because it leads to the lowest costs.
    """
    entry = toml_file("power.toml")["supply"]
    return _range(entry["efficiency"], entry["source"])


def cap_series(gpu: Gpu) -> list[CapSeries]:
    """Return the published measurements of this card at lower power limits, training first."""
    all_series = []
    for entry in toml_file("power.toml")["cap"]:
        if entry["card"] == gpu.name:
            points = tuple((limit, speed, draw or limit) for limit, speed, draw in entry["points"])
            all_series.append(CapSeries(**{**entry, "points": points}))
    return sorted(all_series, key=lambda series: not series.training)


def rental_prices(gpu: Gpu) -> list[Price]:
    """Return the known prices of one hour of this card; the first is an on-demand price."""
    data = toml_file("prices.toml")
    return [
        Price(usd, f"{provider}, {terms}", date, data["sources"][source])
        for entry in data["rent"]
        if entry["card"] == gpu.name
        for provider, terms, usd, date, source in entry["offers"]
    ]


def electricity_prices() -> list[Price]:
    """Return household prices per kWh in some countries, the cheapest first."""
    return [
        Price(entry["usd_per_kwh"], entry["place"], entry["date"], entry["source"])
        for entry in toml_file("prices.toml")["electricity"]
    ]


def default_electricity_price() -> Price:
    """Return the price per kWh of plans for which none is given: the cheapest of `electricity_prices`."""
    return electricity_prices()[0]
