"""Killed commands end like commands that were not killed, and any difference is reported."""

from pathlib import Path

import pytest

from benchmarks import kills
from benchmarks.kill_commands import make_commands


def test_differences_are_found() -> None:
    one = {"curve": [[1, 0.5], [2, 0.25]], "weights": "a"}
    assert (
        kills.first_difference(one, {"curve": [[1, 0.5], [2, 0.26]], "weights": "a"})
        == "/curve/1/1: 0.25 != 0.26"
    )
    assert kills.first_difference(one, {"curve": [[1, 0.5]], "weights": "a"}).startswith("/curve: ")


@pytest.mark.full
def test_what_is_killed_is_the_same_and_what_is_not_the_same_is_told(tmp_path: Path) -> None:
    saved: list[int] = []
    result = kills.run_benchmark(
        tmp_path, 1, 6, ["data", "train", "experts"], lambda r: saved.append(r["kills"]), writes=1
    )
    assert result["by_command"]["experts"]["kills"] >= 1
    assert result["kills"] >= 3 and result["lost_or_different"] == 0 and saved[-1] == result["kills"]
    commands, runner = make_commands(tmp_path), kills.Runner(tmp_path, 2, 1.0)
    reference = commands["data"].outcome(tmp_path / "data-reference")
    counts = result["by_command"]["data"]["kill_points_without_kills"]
    runner.run_trial(commands["data"], {**reference, "index.json": "another"}, 1.0, counts, 1)
    assert "differs from the run without kills" in runner.trials[0].problems[0]
