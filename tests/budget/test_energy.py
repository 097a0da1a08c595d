"""Watts and kilowatt-hours against arithmetic by hand, power limits against the published points."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.budget.energy import at_limit, cap_table, energy, gpu_watts, wall_watts
from deskside.facts import power
from deskside.facts.gpus import find, gpus
from deskside.utils.errors import UsageError

WATTS = st.floats(20, 1500)


def test_the_example_of_the_research() -> None:
    """A 4090 at its limit, 100 W of host, 65 hours: (450 + 100) / 0.9 W, 40 kWh."""
    card = gpu_watts(find("4090"), measured_watts=450)
    wall = wall_watts(card, host_watts=100)
    assert wall.expected == pytest.approx((450 + 100) / 0.90)
    used = energy(wall, 65)
    assert used.expected == pytest.approx(39.7, abs=0.1)
    assert used.low < used.expected < used.high


def test_a_measurement_decides() -> None:
    modelled, measured = gpu_watts(find("h200")), gpu_watts(find("h200"), measured_watts=612)
    assert (modelled.source, measured.source) == ("modelled", "measured")
    assert measured.expected == 612 and measured.high - measured.low < modelled.high - modelled.low
    assert "612 W" in measured.basis and "700 W" in modelled.basis


@pytest.mark.parametrize("gpu", gpus(), ids=lambda g: g.name)
def test_no_card_draws_more_than_its_limit(gpu) -> None:
    watts = gpu_watts(gpu)
    assert 0 < watts.low < watts.expected <= watts.high <= gpu.watts
    assert gpu_watts(gpu, limit_watts=50).high <= 50


def test_several_cards_share_one_host() -> None:
    one = gpu_watts(find("4090"), measured_watts=400)
    assert wall_watts(one, 4, 100).expected == pytest.approx((4 * 400 + 100) / 0.9)


@given(WATTS, st.floats(0, 1000), st.integers(1, 8))
def test_energy_is_ordered_and_linear_in_hours(watts: float, hours: float, count: int) -> None:
    wall = wall_watts(gpu_watts(find("4090"), measured_watts=watts), count)
    used = energy(wall, hours)
    assert used.low <= used.expected <= used.high
    assert energy(wall, 2 * hours).expected == pytest.approx(2 * used.expected)


def test_published_power_limits_come_back() -> None:
    """The 3090 at 280 of its 350 W; the 5090's points were measured on a card of 600 W, its sheet says 575."""
    point = at_limit(find("3090"), 280)
    assert (point.speed_share, point.power_share, point.interpolated) == (0.95, 0.80, False)
    assert point.training and point.energy_share == pytest.approx(0.80 / 0.95)
    full = 0.980 + 0.5 * (1.0 - 0.980)  # the straight line between 550 and 600 W, at 575
    point = at_limit(find("5090"), 400)
    assert point.speed_share == pytest.approx(0.819 / full)
    assert point.power_share == pytest.approx(411 / (0.5 * (555 + 602)))
    assert point.interpolated and not point.training


def test_against_its_own_limit_the_5090_lost_what_was_published() -> None:
    """At 400 of 600 W: 31.7 % less power, 18.1 % less speed."""
    (series,) = power.cap_series(find("5090"))
    (_, slow, low), (_, fast, high) = series.points[0], series.points[-1]
    assert 1 - slow / fast == pytest.approx(0.181, abs=0.0005)
    assert low and high and 1 - low / high == pytest.approx(0.317, abs=0.0005)


@pytest.mark.parametrize("gpu", [g for g in gpus() if power.cap_series(g)], ids=lambda g: g.name)
def test_between_the_points_speed_and_power_rise_with_the_limit(gpu) -> None:
    table = cap_table(gpu)
    assert [p.limit_watts for p in table] == sorted((p.limit_watts for p in table), reverse=True)
    assert all(0 < p.power_share < 1 and p.power_share < p.speed_share <= 1 for p in table)
    assert at_limit(gpu, gpu.watts).speed_share == at_limit(gpu, gpu.watts).power_share == 1
    highest = table[0]
    between = at_limit(gpu, (highest.limit_watts + gpu.watts) / 2)
    assert highest.speed_share < between.speed_share < 1 and between.interpolated


def test_nothing_is_said_outside_of_what_was_measured() -> None:
    with pytest.raises(UsageError, match=r"below the lowest.*400 W"):
        at_limit(find("5090"), 399)
    with pytest.raises(UsageError, match="above the 575 W"):
        at_limit(find("5090"), 600)
    with pytest.raises(UsageError, match="nobody published"):
        at_limit(find("4090"), 300)
    assert cap_table(find("4090")) == ()
    assert (
        at_limit(find("3090"), 230).workload != at_limit(find("3090"), 280).workload
    )  # each from its own source


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_impossible_numbers_are_one_line(value: float) -> None:
    card = find("4090")
    for ask in (
        lambda: gpu_watts(card, limit_watts=value),
        lambda: gpu_watts(card, measured_watts=value),
        lambda: wall_watts(gpu_watts(card), host_watts=value),
        lambda: at_limit(find("3090"), value),
    ):
        with pytest.raises(UsageError) as error:
            ask()
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError):
        wall_watts(gpu_watts(card), 0)
    if value != 0:
        with pytest.raises(UsageError):
            energy(wall_watts(gpu_watts(card)), value)
