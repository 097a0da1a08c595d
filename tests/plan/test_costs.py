"""Energy and money of a plan: the arithmetic by hand, and prices that always name their source."""

from dataclasses import replace

import pytest

from deskside.facts import gpus
from deskside.facts import power_and_prices as facts
from deskside.plan.costs import cost
from deskside.plan.planner import make_plan
from tests.plan import made

DAY = 86400.0


def test_kilowatt_hours_by_hand() -> None:
    """An RTX 4090 for a day: (450 W x its share + host) / efficiency x 24 h."""
    found = cost(made.request(price_kwh=0.4), (DAY, DAY, DAY), "a day")
    card = gpus.find("rtx4090")
    watts = (
        facts.training_load(card).expected * card.watts + facts.host_watts().expected
    ) / facts.supply_efficiency().expected
    assert found.kwh is not None and found.electricity is not None
    assert found.kwh[1] == pytest.approx(watts * 24 / 1000)
    assert found.electricity.amount[1] == pytest.approx(watts * 24 / 1000 * 0.4)
    assert found.kwh[0] < found.kwh[1] < found.kwh[2]
    assert found.electricity.source == "given"


def test_measured_watts_count_more_than_the_sheet() -> None:
    found = cost(made.request(measured_watts=300.0), (DAY, DAY, DAY), "a day")
    assert found.wall is not None and found.wall.basis.startswith("(1 x 300 W + ")


def test_the_range_of_the_time_is_in_the_range_of_the_cost() -> None:
    found = cost(made.request(), (DAY / 2, DAY, 2 * DAY), "a day")
    assert found.kwh is not None
    assert found.kwh[0] < found.kwh[1] / 2 * 1.01
    assert found.kwh[2] > found.kwh[1] * 2 * 0.99
    assert found.rent is not None and found.rent.amount[0] == pytest.approx(found.rent.amount[2] / 4)


def test_two_cards_cost_twice_the_rent() -> None:
    one, two = (cost(made.request(gpus=n, rent_per_hour=0.5), (DAY, DAY, DAY), "a day") for n in (1, 2))
    assert one.rent is not None and two.rent is not None
    assert one.rent.amount[1] == pytest.approx(12.0) and two.rent.amount[1] == pytest.approx(24.0)


def test_break_even() -> None:
    """Hours = price / (rent - electricity per hour)."""
    found = cost(made.request(price_kwh=0.2, rent_per_hour=0.6), (DAY, DAY, DAY), "a day")
    card = gpus.find("rtx4090")
    assert found.own is not None and found.wall is not None and card.msrp_usd is not None
    hours = card.msrp_usd / (0.6 - found.wall.expected / 1000 * 0.2)
    assert found.own.break_even_hours == pytest.approx(hours)
    never = cost(made.request(price_kwh=2.0, rent_per_hour=0.6), (DAY, DAY, DAY), "a day")
    assert never.own is not None and never.own.break_even_hours is None
    assert "never" in never.own.summary


def test_an_unknown_card_has_no_cost_and_says_so() -> None:
    request = made.request()
    request = replace(request, card=replace(request.card, gpu=None, name="Mystery 1000"))
    plan = make_plan(request)
    assert plan.best is not None
    found = plan.best.cost
    assert found.kwh is None and found.electricity is None and found.own is None
    assert any("Mystery 1000" in note for note in found.notes)
    assert plan.to_json()["cost"]["kwh"] is None


def test_hours_are_paid_whole_and_tokens_for_the_run_alone() -> None:
    whole = make_plan(made.request(value=24.0)).best
    run = make_plan(made.request("tokens", 1e9)).best
    assert whole is not None and run is not None
    assert whole.cost.hours == (24.0, 24.0, 24.0)
    assert run.cost.hours[1] == pytest.approx(run.candidate.seconds[1] / 3600)
    assert (whole.cost.of, run.cost.of) == ("the whole budget", "the pretraining run")
