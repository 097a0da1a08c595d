"""Power draw of cards (`power.toml`) and dated prices of renting and electricity (`prices.toml`).

Prices are anchors, not quotes. Nothing here applies itself: whoever shows one of these numbers shows `Price.label` with
it ("published 2026-03, ..."), and a price that the user gives wins.
"""

from dataclasses import dataclass

from deskside.facts.data_files import toml_file
from deskside.facts.gpus import Gpu


@dataclass(frozen=True)
class Share:
    """A share of something, or watts, with its range and its source."""

    low: float
    expected: float
    high: float
    source: str


@dataclass(frozen=True)
class CapSeries:
    """Speed at several power limits, one card, one workload.

    points: (limit in watts, speed as a share of the speed at default_watts, draw in watts), by rising limit. A draw
    that was not published is the limit, which matrix products on GeForce cards reach. training: False for inference,
    which loses less.
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
    """usd: per GPU-hour for rent, per kWh for electricity. what: the offer ("RunPod, on demand") or the place."""

    usd: float
    what: str
    date: str
    source: str

    @property
    def label(self) -> str:
        """The label of the number: published, when, by whom."""
        return f"published {self.date}: {self.what}; {self.source}"


def _share(values: list[float], source: str) -> Share:
    low, expected, high = values
    return Share(low, expected, high, source)


def training_load(gpu: Gpu) -> Share:
    """Return the average draw of this card in training, as a share of its limit."""
    entries = {entry["kind"]: entry for entry in toml_file("power.toml")["load"]}
    entry = entries["geforce" if gpu.geforce else "other"]
    return _share(entry["share"], entry["source"])


def host_watts() -> Share:
    """Return the watts that the computer draws without its cards."""
    entry = toml_file("power.toml")["host"]
    return _share(entry["watts"], entry["source"])


def supply_efficiency() -> Share:
    """Return the share of the power at the wall that reaches the components. low: the best supply."""
    entry = toml_file("power.toml")["supply"]
    return _share(entry["efficiency"], entry["source"])


def cap_series(gpu: Gpu) -> list[CapSeries]:
    """Return the published measurements of this card at lower power limits, training first."""
    found = [
        CapSeries(**{**entry, "points": tuple((w, speed, draw or w) for w, speed, draw in entry["points"])})
        for entry in toml_file("power.toml")["cap"]
        if entry["card"] == gpu.name
    ]
    return sorted(found, key=lambda series: not series.training)


def rents(gpu: Gpu) -> list[Price]:
    """Return every price that we have of an hour of this card; the on-demand price of the largest list comes first."""
    data = toml_file("prices.toml")
    return [
        Price(usd, f"{provider}, {terms}", date, data["sources"][source])
        for entry in data["rent"]
        if entry["card"] == gpu.name
        for provider, terms, usd, date, source in entry["offers"]
    ]


def electricity() -> list[Price]:
    """Return household prices of a kWh by place, the cheapest first."""
    return [
        Price(entry["usd_per_kwh"], entry["place"], entry["date"], entry["source"])
        for entry in toml_file("prices.toml")["electricity"]
    ]
