"""Killing at chosen moments of writes, and telling what was lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kills

WRITE = """
import os, sys
from pathlib import Path
from benchmarks.kill_points import KillPoints
folder, point, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
points = KillPoints(folder / "record", point, at)
points.install()
for name in "ab":
    with (folder / f"{name}.tmp").open("w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / f"{name}.tmp", folder / name)
points.finish()
"""


@pytest.mark.parametrize(
    ("point", "at", "left"),
    [
        ("fsync", 2, {"a", "b.tmp"}),
        ("replace", 1, {"a.tmp"}),
        ("replaced", 1, {"a"}),
        ("replaced", 3, {"a", "b"}),
    ],
)
def test_a_process_dies_at_its_kill_point(tmp_path: Path, point: str, at: int, left: set[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path), point, str(at)],
        start_new_session=True,
        cwd=Path(kills.__file__).parents[1],
        check=False,
    )
    record = json.loads((tmp_path / "record").read_text())
    assert {p.name for p in tmp_path.iterdir()} == left | {"record"}
    if at == 3:
        assert run.returncode == 0 and record["killed_at"] is None and record["counts"][point] == 2
    else:
        assert run.returncode == -9 and record["counts"][point] == at


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
    commands, runner = kills.make_commands(tmp_path), kills.Runner(tmp_path, 2, 1.0)
    reference = commands["data"].outcome(tmp_path / "data-reference")
    counts = result["by_command"]["data"]["kill_points_without_kills"]
    runner.run_trial(commands["data"], {**reference, "index.json": "another"}, 1.0, counts, 1)
    assert "differs from the run without kills" in runner.trials[0].problems[0]
