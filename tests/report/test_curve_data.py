"""Bands over seeds: numpy computes them, and the report and the dashboard draw the same ones."""

import numpy as np
import pytest

from deskside.report.curve_data import finished_curves, loss_key, running_median, seed_band, y_range
from tests.study import made


def test_a_band_covers_what_all_seeds_cover() -> None:
    band = seed_band([[(0, 4.0), (2, 2.0), (4, 1.0)], [(1, 5.0), (3, 3.0)]])
    assert list(band.x) == [1, 2, 3] and band.seeds == 2
    assert list(band.low) == [3.0, 2.0, 1.5] and list(band.high) == [5.0, 4.0, 3.0]
    assert list(band.mean) == [4.0, 3.0, 2.25]


def test_the_band_of_an_arm_is_the_mean_of_its_finished_trials() -> None:
    arm = made.results().arms[0]
    band = seed_band(finished_curves(arm, "val_bpb", "tokens"))
    ends = [trial.metrics["val_bpb"] for trial in arm.finished()]
    assert band.seeds == 3 and band.low[-1] <= band.mean[-1] <= band.high[-1]
    shortest = min(trial.metrics["tokens"] for trial in arm.finished())
    assert band.x[-1] == pytest.approx(shortest)
    assert min(ends) - 0.01 < band.mean[-1] < max(ends) + 0.01


def test_the_loss_that_is_drawn_is_the_one_with_enough_points() -> None:
    arms = made.results().arms
    assert loss_key(arms, "tokens") == "val_bpb"
    for arm in arms:
        for trial in arm.trials:
            for row in trial.curve[:-1]:
                row["val_bpb"] = None
    assert loss_key(arms, "tokens") == "loss"


def test_the_first_steps_do_not_stretch_the_axis() -> None:
    x = np.arange(1, 101)
    falling = seed_band([[(float(i), 2.0 + 8.0 / i) for i in x]])
    view = y_range([falling])
    assert view is not None and view[0] < 2.08 and view[1] < 2.5
    assert y_range([seed_band([[(0.0, 1.0), (1.0, 1.5)]])]) is None  # no high values at the beginning


def test_the_running_median_leaves_out_one_spike() -> None:
    assert running_median([1.0] * 19) is None
    smooth = running_median([1.0] * 15 + [50.0] + [1.0] * 15)
    assert smooth == [1.0] * 31
