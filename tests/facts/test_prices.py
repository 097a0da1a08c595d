"""Prices and power entries have a date and a source, and belong to GPUs that exist."""

import re
import tomllib
from importlib import resources

import pytest

from deskside.facts import power_and_prices as facts
from deskside.facts.gpus import Gpu, find, gpus


def test_every_price_is_of_a_card_in_the_table_and_is_dated() -> None:
    data = tomllib.loads(resources.files("deskside.facts").joinpath("prices.toml").read_text("utf-8"))
    names = {gpu.name for gpu in gpus()}
    assert {entry["card"] for entry in data["rent"]} <= names
    assert len({entry["card"] for entry in data["rent"]}) == len(data["rent"])
    for gpu in gpus():
        for price in (*facts.rental_prices(gpu), *facts.electricity_prices()):
            assert re.fullmatch(r"20\d\d(-\d\d){0,2}", price.date)
            assert 0.05 < price.usd < 20 and price.source
            assert price.label.startswith("published 20") and price.date in price.label


def test_the_anchor_is_on_demand_and_spot_is_cheaper() -> None:
    for gpu in gpus():
        offers = facts.rental_prices(gpu)
        for offer in offers:
            assert "on demand" in offers[0].offer
            if "spot" in offer.offer:
                assert offer.usd < offers[0].usd


def test_known_prices() -> None:
    price = facts.rental_prices(find("4090"))[0]
    assert (price.usd, price.date) == (0.60, "2026-03")
    assert facts.rental_prices(find("3060 12gb")) == []


def test_power_shares_are_ordered_and_sourced() -> None:
    for gpu in gpus():
        share = facts.training_load(gpu)
        assert 0.5 < share.low < share.expected <= share.high <= 1 and share.source
    assert facts.host_watts().low < facts.host_watts().expected < facts.host_watts().high
    supply = facts.supply_efficiency()
    assert 1 > supply.low > supply.expected > supply.high > 0.8  # low, as a share of the consumption


@pytest.mark.parametrize("gpu", [g for g in gpus() if facts.cap_series(g)], ids=lambda g: g.name)
def test_cap_series_rise_and_end_at_the_full_limit(gpu: Gpu) -> None:
    for series in facts.cap_series(gpu):
        limits = [limit for limit, _, _ in series.points]
        speeds = [speed for _, speed, _ in series.points]
        assert limits == sorted(set(limits)) and speeds == sorted(speeds)
        assert series.points[-1][:2] == (series.default_watts, 1.0)
        assert series.source and series.date
