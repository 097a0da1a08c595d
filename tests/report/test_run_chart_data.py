"""The lines of the charts of runs."""

import random

import pandas as pd
import pytest

from deskside.report.run_chart_data import (
    CHARTS,
    MAX_POINTS,
    RunChart,
    clipped_top,
    run_line,
    smoothed,
    thinned,
)

RANDOM = random.Random(7)
NOISE = [3.0 + RANDOM.gauss(0, 0.3) for _ in range(500)]
BY_KEY = {chart.key: chart for chart in CHARTS}


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.99])
def test_smoothing_is_the_moving_average_of_pandas(weight: float) -> None:
    expected = pd.Series(NOISE).ewm(alpha=1 - weight, adjust=True).mean()
    assert smoothed(NOISE, weight) == pytest.approx(expected.tolist())


def test_thinning_keeps_every_spike_and_the_newest_point() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[31_415] = (31_415.0, 9.0)
    points[27_182] = (27_182.0, -9.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS and {points[31_415], points[27_182], points[-1]} <= set(kept)
    assert kept == sorted(kept) and thinned(points[:50]) == points[:50]
    points[99_990] = (99_990.0, 99.0)  # in the last interval
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS and {points[0], points[99_990], points[-1]} <= set(kept)


def test_the_top_leaves_out_the_first_losses_only_if_they_flatten_the_rest() -> None:
    assert clipped_top([10.0 + i for i in range(50)]) is None
    steep = [11.0, *[4.0 - i / 1000 for i in range(400)]]
    top = clipped_top(steep)
    assert top is not None and 4.0 <= top < 5.0
    assert clipped_top(steep[:10]) is None


def rows(keys: tuple[str, ...] = ("loss", "lr")) -> list[dict[str, float | None]]:
    return [
        {"step": i, "tokens": 10 * i, "seconds": 0.5 * i, **dict.fromkeys(keys, 1.0 / (1 + i))}
        for i in range(20)
    ]


def test_a_noisy_line_keeps_its_raw_points_and_its_newest_value() -> None:
    line = run_line("a", rows(), {}, BY_KEY["loss"], "tokens", 0.9)
    assert line is not None and len(line.raw) == len(line.points) == 20
    assert line.raw[-1] == (190.0, 0.05) and line.newest == 0.05 and line.points[-1][1] > 0.05
    steady = run_line("a", rows(), {}, BY_KEY["lr"], "step", 0.9)
    assert steady is not None and steady.raw == [] and steady.points[-1] == (19.0, 0.05)


@pytest.mark.parametrize(("x_key", "end"), [("tokens", 500.0), ("step", 50.0), ("seconds", 25.0)])
def test_the_last_evaluation_is_that_of_the_summary(x_key: str, end: float) -> None:
    summary = {"val_bpb": 1.25, "tokens": 500, "steps": 50, "seconds": 25.0}
    line = run_line("a", rows(("loss",)), summary, BY_KEY["val_bpb"], x_key, 0.5)
    assert line is not None and (line.points, line.final, line.newest) == ([], (end, 1.25), 1.25)


def test_what_was_not_logged_has_no_line() -> None:
    assert run_line("a", rows(), {}, RunChart("watts", ""), "tokens", 0.0) is None
    assert run_line("a", [], {}, BY_KEY["loss"], "tokens", 0.0) is None
