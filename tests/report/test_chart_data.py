"""Axes follow the means, and values that are cut off are marked."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.report import chart_data
from deskside.study.metrics import SPEED
from deskside.study.results import Arm, Estimate, Trial

positive = st.floats(1e-6, 1e9)


@given(st.floats(1e-9, 1e9), st.floats(1.002, 1e12))
def test_a_logarithmic_axis_of_any_length_has_ticks(start: float, times: float) -> None:
    ticks = chart_data.log_ticks((start, start * times))
    assert 3 <= len(ticks) <= 8 and ticks == sorted(set(ticks))
    assert ticks[0] >= start * (1 - 1e-9) and ticks[-1] <= start * times * (1 + 1e-9)


@given(threshold=st.floats(1e-3, 100), times=st.floats(6, 1e4))
def test_ticks_around_zero_are_a_decade_apart(threshold: float, times: float) -> None:
    """An outlier is at least six thresholds away (forest_chart), and a decade of such an axis has room for a label."""
    ticks = chart_data.symmetric_log_ticks(threshold, threshold * times)
    assert ticks == [-tick for tick in reversed(ticks)] and 3 <= len(ticks) <= 5
    above = [tick for tick in ticks if tick > 0]
    assert threshold * 0.99 <= above[0] and above[-1] <= threshold * times * 1.01
    assert len(above) == 1 or above[1] >= 9.99 * above[0]


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    mean = draw(positive)
    if draw(st.booleans()):
        return Estimate(mean, None, None, 1)
    width = draw(st.floats(0, 10))
    return Estimate(mean, mean * (1 - width), mean * (1 + width), 2)


@given(found=st.lists(estimates(), min_size=1, max_size=8), log=st.booleans())
def test_every_mean_is_inside_and_every_end_is_drawn_or_marked(found: list[Estimate], log: bool) -> None:
    start, stop = chart_data.axis_range(found, log)
    assert math.isfinite(start) and math.isfinite(stop) and (start > 0 or not log)
    for one in found:
        assert start <= one.mean <= stop
        cut = chart_data.to_interval(one, (start, stop))
        assert start <= cut.low <= one.mean <= cut.high <= stop
        assert cut.clipped_low == (one.low is not None and one.low < start)
        assert cut.clipped_high == (one.high is not None and one.high > stop)


def test_one_wide_interval_does_not_press_the_others_together() -> None:
    found = [Estimate(mean, mean - 1, mean + 1, 2) for mean in (100.0, 110.0, 120.0)]
    start, stop = chart_data.axis_range([*found, Estimate(105.0, -900.0, 1110.0, 2)])
    assert start == pytest.approx(100 - 10 - 2.4) and stop == pytest.approx(120 + 10 + 2.4)


def test_where_all_intervals_are_wide_they_are_drawn_whole() -> None:
    found = [Estimate(mean, mean - 5, mean + 5, 2) for mean in (100.0, 100.1, 100.2)]
    assert not any(
        end
        for one in found
        for end in (
            chart_data.to_interval(one, chart_data.axis_range(found)).clipped_low,
            chart_data.to_interval(one, chart_data.axis_range(found)).clipped_high,
        )
    )


def test_wide_is_said_of_means_alone() -> None:
    assert chart_data.needs_log([Estimate(1.0, None, None, 1), Estimate(9.0, None, None, 1)])
    assert not chart_data.needs_log([Estimate(1.0, 0.0, 100.0, 2), Estimate(2.0, None, None, 1)])
    assert not chart_data.needs_log([Estimate(0.0, None, None, 1), Estimate(9.0, None, None, 1)])


def test_relative_differences_reach_three_times_the_largest() -> None:
    assert chart_data.difference_half_range([1.0, -2.0], [400.0]) == pytest.approx(1.12 * 6)
    assert chart_data.difference_half_range([1.0, -2.0], [-3.0]) == pytest.approx(1.12 * 3)
    assert chart_data.difference_half_range([0.0], []) > 0


def arms(*means: float | None) -> list[Arm]:
    """Return arms with these speeds; None was not measured. The first is the baseline of all."""
    return [
        Arm(
            name,
            name,
            "group",
            {},
            "0",
            trials=[Trial(1, "oom" if mean is None else "finished")],
            estimates={} if mean is None else {SPEED: Estimate(mean, None, None, 1)},
        )
        for name, mean in ((str(number), mean) for number, mean in enumerate(means))
    ]


def test_a_bar_chart_leaves_out_arms_that_were_not_measured_first() -> None:
    """Without a measured baseline no arm is compared, so none differs more than another."""
    chart = chart_data.bar_chart(arms(None, None, 3.0, None, 5.0), SPEED, max_arms=2)
    assert chart is not None and [row.arm.id for row in chart.rows] == ["2", "4"] and chart.hidden == 3
    chart = chart_data.bar_chart(arms(None, None, 3.0, None, 5.0), SPEED, max_arms=3)
    assert chart is not None and [row.arm.id for row in chart.rows] == ["0", "2", "4"]
    assert chart_data.bar_chart(arms(None, None), SPEED, max_arms=1) is None


@pytest.mark.parametrize("means", [(0.0,), (0.0, None), (-2.0, -3.0), (0.0, 3.0)])
def test_the_axis_of_a_bar_chart_contains_its_bars_and_has_a_width(means: tuple[float | None, ...]) -> None:
    chart = chart_data.bar_chart(arms(*means), SPEED)
    assert chart is not None
    left, right = chart.axis.range
    assert left < right and left <= 0 <= right
    assert all(left <= row.interval.mean <= right for row in chart.rows if row.interval is not None)
