"""Dated prices from `prices.toml`: renting a card by the hour, electricity. Anchors, not quotes.

Nothing here applies itself. Whoever shows one of these numbers shows `Price.label` with it ("published 2026-03, ..."),
and a price that a person gives wins.
"""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from deskside.facts.gpus import Gpu
from deskside.utils.parsing import toml_table


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


def rent(gpu: Gpu) -> Price | None:
    """Return the on-demand price of an hour of this card, the first of `rents`, or None without one."""
    offers = rents(gpu)
    return offers[0] if offers else None


def rents(gpu: Gpu) -> tuple[Price, ...]:
    """Return every price that we have of this card; the on-demand price of the largest list comes first."""
    data = _data()
    return tuple(
        Price(usd=usd, what=f"{provider}, {terms}", date=date, source=data["sources"][source])
        for entry in data["rent"]
        if entry["card"] == gpu.name
        for provider, terms, usd, date, source in entry["offers"]
    )


def electricity() -> tuple[Price, ...]:
    """Return household prices of a kWh by place, the cheapest first."""
    return tuple(
        Price(usd=entry["usd_per_kwh"], what=entry["place"], date=entry["date"], source=entry["source"])
        for entry in _data()["electricity"]
    )


@cache
def _data() -> dict[str, Any]:
    return toml_table(resources.files("deskside.facts").joinpath("prices.toml").read_text("utf-8"))
