"""A process dies at its kill point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

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
        cwd=ROOT,
        check=False,
    )
    record = json.loads((tmp_path / "record").read_text())
    assert {p.name for p in tmp_path.iterdir()} == left | {"record"}
    if at == 3:
        assert run.returncode == 0 and record["killed_at"] is None and record["counts"][point] == 2
    else:
        assert run.returncode == -9 and record["counts"][point] == at
