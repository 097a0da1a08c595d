"""A launched process: its error as torch's launcher reads it, its launcher's start time, and its end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deskside
from deskside.utils import launched

BEGIN = "from deskside.utils import launched; launched.begin(); print('began')"


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launched.LAUNCHER, raising=False)
    before = deskside.STARTED
    launched.begin()
    assert not launched.is_launched() and before == deskside.STARTED
    assert launched.report("deskside: no", "error") is False


def test_torch_reads_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv(launched.LAUNCHER, "1")
    monkeypatch.setenv(launched.ERROR_FILE, str(file))
    before = time.time()
    assert launched.report('deskside: "no"\nmore', "unexpected")
    failure = ProcessFailure(0, 1, 1, str(file))
    assert failure.message == 'deskside: "no"\nmore' and before - 1 < failure.timestamp <= time.time()
    assert failure.error_file_data["kind"] == "unexpected"
    assert before <= failure.error_file_data["seconds"] <= time.time()
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
    monkeypatch.setenv(launched.ERROR_FILE, str(tmp_path / "nowhere" / "error.json"))
    assert launched.report("deskside: no", "error") is False


def run(launcher: int) -> "subprocess.CompletedProcess[str]":
    variables = {**os.environ, **launched.environment(), launched.LAUNCHER: str(launcher)}
    return subprocess.run([sys.executable, "-c", BEGIN], env=variables, capture_output=True, text=True)


def test_it_does_not_begin_if_its_launcher_has_ended() -> None:
    assert run(os.getpid()).stdout == "began\n"
    orphan = run(os.getppid())
    assert (orphan.returncode, orphan.stdout) == (1, "")


def test_its_time_counts_from_the_start_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deskside, "STARTED", time.perf_counter() - 100)
    code = BEGIN.replace(
        "print('began')", "import deskside, time; print(time.perf_counter() - deskside.STARTED)"
    )
    variables = {**os.environ, **launched.environment()}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert 100 < float(result.stdout) < 160
