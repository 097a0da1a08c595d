"""What a trial writes, and trials in processes that were started before their jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deskside.study.execute.devices import Device
from deskside.study.execute.executor import LocalExecutor
from deskside.study.execute.runner import Runner
from deskside.study.execute.trial_process import (
    LOG_FILE,
    TrialEnd,
    TrialJob,
    TrialProcess,
    WaitingProcess,
    train,
)
from tests.study import fake_trials, tiny_study
from tests.train import tiny_run

SETTINGS: dict[str, Any] = {"schedule": {"length": "20 steps"}, "checkpoint": {"every": "10 steps"}}


def trial(data: Path, run: Path, *, resume: bool = False, keep_model: bool) -> dict[str, Any]:
    """Run a trial and return its summary without what depends on the machine's speed."""
    if not resume:
        (run / "checkpoints").mkdir(parents=True)
    config = tiny_run.config(data, **SETTINGS).model_dump(mode="json")
    assert train(TrialJob("", str(run), config, "a test", resume, 1.0, keep_model)) == ("finished", "")
    summary = json.loads((run / "summary.json").read_text())
    return {k: v for k, v in summary.items() if k != "mfu" and "second" not in k and "memory" not in k}


def test_only_a_kept_model_is_written(data: Path, tmp_path: Path) -> None:
    kept = trial(data, tmp_path / "kept", keep_model=True)
    dropped = trial(data, tmp_path / "dropped", keep_model=False)
    assert kept == dropped
    assert (tmp_path / "kept" / "model" / "model.safetensors").exists()
    assert not (tmp_path / "dropped" / "model").exists()
    assert tiny_run.checkpoints(tmp_path / "kept")[-1] == "step-000000020"
    assert tiny_run.checkpoints(tmp_path / "dropped")[-1] == "step-000000010"


@pytest.mark.full
def test_a_trial_that_was_killed_at_its_end_is_resumed(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    straight = trial(data, run, keep_model=False)
    (run / "summary.json").unlink()
    assert trial(data, run, resume=True, keep_model=False) == straight


FAKE = fake_trials.environment()


def fake_job(run: Path) -> TrialJob:
    (run / "checkpoints").mkdir(parents=True)
    return TrialJob(fake_trials.TARGET, str(run), {"seed": 1}, "a test", False, 1.0)


def end_of(process: TrialProcess) -> TrialEnd:
    while (end := process.poll()) is None:
        time.sleep(0.05)
    return end


def test_a_waiting_process_runs_the_trial_and_writes_its_log(tmp_path: Path) -> None:
    waiting = WaitingProcess(FAKE)
    process = TrialProcess(fake_job(tmp_path / "run"), FAKE, None, waiting)
    waiting.close()  # without effect: it has a job
    assert end_of(process).status == "finished"
    assert "a library says something" in (tmp_path / "run" / LOG_FILE).read_text()


@pytest.mark.full
def test_a_waiting_process_that_died_is_replaced(tmp_path: Path) -> None:
    waiting = WaitingProcess(
        {**FAKE, "PYTHONPATH": "/nowhere", "PYTHONSAFEPATH": "1", "PYTHONHOME": "/nowhere"}
    )
    time.sleep(1.0)
    process = TrialProcess(fake_job(tmp_path / "run"), FAKE, None, waiting)
    assert end_of(process).status == "finished"


@pytest.mark.full
def test_the_wall_clock_begins_with_the_job(data: Path, tmp_path: Path) -> None:
    """Otherwise a run of some hours would have lost those that its process waited."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    config = tiny_run.config(data, schedule={"length": "2 steps", "clock": "wall"}).model_dump(mode="json")
    job = TrialJob("deskside.study.execute.trial_process:train", str(run), config, "a test", False, 1.0)
    waiting = WaitingProcess(tiny_run.ONE_THREAD)
    time.sleep(3.0)
    began = time.monotonic()
    assert end_of(TrialProcess(job, {}, None, waiting)).status == "finished"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["clock"] == "wall" and summary["seconds"] <= time.monotonic() - began


@pytest.mark.full
def test_a_waiting_process_ends_with_its_study(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from deskside.study.execute.trial_process import WaitingProcess; "
        "print(WaitingProcess({})._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as study:
        assert study.stdout is not None
        pid = int(study.stdout.readline())
        os.kill(study.pid, signal.SIGKILL)
    deadline = time.monotonic() + 120.0
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the process outlives its study"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "acts",
    [{}, pytest.param({"depth_two__tied_no__s1": "die"}, marks=pytest.mark.full)],
    ids=["finish", "die"],
)
def test_a_study_on_a_gpu_starts_processes_ahead(tmp_path: Path, acts: dict[str, str]) -> None:
    folder = tiny_study.begin(tmp_path / "study")
    executor = LocalExecutor([Device("cuda:0", fake_trials.environment(**acts))])
    runner = Runner(folder, folder.read(), executor, target=fake_trials.TARGET)
    taken = []

    def prepare(device: Device, lock: int | None) -> None:
        LocalExecutor.prepare(executor, device, lock)
        taken.append(executor._waiting[device.name])

    executor.prepare = prepare  # type: ignore[method-assign]
    runner.run(runner.remaining())
    statuses = sorted(history.status for history in runner.journal.histories.values())
    assert statuses == sorted(["killed" if acts else "finished", *["finished"] * 3])
    assert len(taken) == 3 and all(process._process is None for process in taken)
