"""Prices and power: dated, sourced, about cards that exist."""

import re
import tomllib
from importlib import resources

import pytest

from deskside.facts import power, prices
from deskside.facts.gpus import find, gpus


def test_every_price_is_of_a_card_in_the_table_and_is_dated() -> None:
    data = tomllib.loads(resources.files("deskside.facts").joinpath("prices.toml").read_text("utf-8"))
    names = {gpu.name for gpu in gpus()}
    assert {entry["card"] for entry in data["rent"]} <= names
    assert len({entry["card"] for entry in data["rent"]}) == len(data["rent"])
    for gpu in gpus():
        for price in (*prices.rents(gpu), *prices.electricity()):
            assert re.fullmatch(r"20\d\d(-\d\d){0,2}", price.date)
            assert 0.05 < price.usd < 20 and price.source
            assert price.label.startswith("published 20") and price.date in price.label


def test_the_anchor_is_on_demand_and_spot_is_cheaper() -> None:
    for gpu in gpus():
        anchor = prices.rent(gpu)
        assert (anchor is None) == (not prices.rents(gpu))
        for offer in prices.rents(gpu):
            assert anchor is not None and "on demand" in anchor.what
            if "spot" in offer.what:
                assert offer.usd < anchor.usd


def test_known_prices() -> None:
    price = prices.rent(find("4090"))
    assert price is not None and (price.usd, price.date) == (0.60, "2026-03")
    assert prices.rent(find("3060 12gb")) is None


def test_power_shares_are_ordered_and_sourced() -> None:
    for gpu in gpus():
        share = power.load(gpu)
        assert 0.5 < share.low < share.expected <= share.high <= 1 and share.source
    assert power.host().low < power.host().expected < power.host().high
    supply = power.supply_efficiency()
    assert 1 > supply.low > supply.expected > supply.high > 0.8  # low: of the consumption


@pytest.mark.parametrize("gpu", [g for g in gpus() if power.cap_series(g)], ids=lambda g: g.name)
def test_cap_series_rise_and_end_at_the_full_limit(gpu) -> None:
    for series in power.cap_series(gpu):
        limits = [limit for limit, _, _ in series.points]
        speeds = [speed for _, speed, _ in series.points]
        assert limits == sorted(set(limits)) and speeds == sorted(speeds)
        assert series.points[-1][:2] == (series.default_watts, 1.0)
        assert series.source and series.date
