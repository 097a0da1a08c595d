"""The progress of a run, and the predictions for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from deskside.dashboard.runs import progress, run_predictions, trial_predictions
from deskside.run.record import MetricsLog, read_brief, read_metrics, read_object
from deskside.study.stats.compare import compare
from tests.dashboard import made_up
from tests.study import made


def test_the_time_left_is_the_steps_left_at_the_pace_of_the_last_ones(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r", steps=40, of=200, finished=False)
    now = progress(read_brief(tmp_path / "r"), read_metrics(tmp_path / "r"))
    assert (now.step, now.total, now.share) == (40, 200, 0.2)
    assert now.seconds_left == pytest.approx(160 * 0.5)
    assert "80 s left" in now.text and "1 s left" in replace(now, seconds_left=0.928).text
    assert now.values["val_bpb"] == pytest.approx(1.025)  # of step 40, though most steps have none
    assert now.values["watts"] == 310.0


def test_a_pause_between_steps_is_not_its_pace(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r", steps=0, of=100, finished=False)
    rows = [made_up.row(step) for step in range(1, 21)]
    for late in rows[10:]:
        late["seconds"] += 300.0  # an evaluation
    found = progress(read_brief(tmp_path / "r"), MetricsLog(rows))
    assert found.seconds_left == pytest.approx(80 * 0.5)


def test_a_run_that_has_not_begun_knows_nothing(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    found = progress(read_brief(tmp_path / "r"), read_metrics(tmp_path / "r"))
    assert (found.step, found.total, found.seconds_left, found.share) == (None, None, None, None)
    assert found.values == {}


def test_predictions_stand_beside_what_came(tmp_path: Path) -> None:
    made_up.run(tmp_path / "done")
    made_up.run(tmp_path / "open", finished=False)
    runs = [
        (read_brief(path), read_object(path / "plan.json")[0])
        for path in (tmp_path / "done", tmp_path / "open")
    ]
    rows = {row.quantity: row for row in run_predictions(runs)}
    assert {row.name for row in rows.values()} == {"done"}
    speed = rows["speed, tokens/s"]
    assert (speed.predicted, speed.low, speed.high) == (120000, 90000, 150000)
    assert speed.ratio == pytest.approx(131072 / 120000)
    assert rows["peak memory, GiB"].ratio == pytest.approx(8.4 / 8.0)


def test_a_study_has_the_time_of_its_trials() -> None:
    from dataclasses import replace

    whole = compare(made.results())
    arms = [replace(arm, forecast_seconds=300.0) for arm in whole.arms]
    rows = trial_predictions("s", replace(whole, arms=arms))
    assert len(rows) == 8 and rows[0].ratio == pytest.approx(270 / 300)
    assert trial_predictions("s", whole) == []  # nothing was predicted
