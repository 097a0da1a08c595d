"""The scripts of a machine that is lent for half an hour (benchmarks/lease/)."""

import os
import subprocess
import tarfile
from pathlib import Path

POLL = Path(__file__).parents[2] / "benchmarks" / "lease" / "poll.sh"


def poll(home: Path, seconds: int, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OUT": str(home), **more}
    return subprocess.run(
        ["bash", POLL, str(seconds)], env=environment, capture_output=True, text=True, check=False
    )


def test_a_machine_without_jobs_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    result = poll(tmp_path, 600)  # longer than a test may take
    assert result.returncode == 2
    assert "start.sh" in result.stderr


def test_a_bundle_that_is_not_complete_is_not_waited_for(tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    (lease / "out").mkdir(parents=True)
    (lease / "out" / "release.log").write_text("english is complete")
    for name in ("english/.parts/unpacked", "sets/.parts/2"):
        (lease / f"bundle-{name}").parent.mkdir(parents=True)
        (lease / f"bundle-{name}").touch()
    result = poll(tmp_path, 600, START_SECONDS="0")
    assert result.returncode == 3
    assert "bundle-sets/.parts has only: 2" in result.stderr and "bundle-english" not in result.stderr


def test_results_are_packed_without_weights(tmp_path: Path) -> None:
    out = tmp_path / "lease" / "out"
    (out / "job").mkdir(parents=True)
    for name in ("release.log", "done", "job/result.json", "job/model.safetensors"):
        (out / name).write_text(name)
    poll(tmp_path, 600)
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert set(archive.getnames()) == {"out/release.log", "out/done", "out/job/result.json"}
