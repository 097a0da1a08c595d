"""Which studies and runs are active, which are not, and which only claim to be."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deskside.run.directory import RunDirectory
from deskside.study import liveness
from deskside.study.results import Results, Trial
from deskside.utils.errors import UsageError
from tests.dashboard import made_up
from tests.study import made


def test_a_run_is_live_while_its_lock_is_held(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with made_up.running(path):
        old = time.time() - 3600
        for name in ("metrics.jsonl", "plan.json", "run.json"):
            os.utime(path / name, (old, old))
        assert liveness.is_live(path, time.time(), liveness.held_locks())
    assert not liveness.is_live(path, time.time(), liveness.held_locks())


def test_a_run_that_released_its_lock_here_was_interrupted(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r", finished=False)
    now, run = time.time(), RunDirectory(tmp_path / "r")
    with run.lock_for_training(True):
        assert liveness.is_live(run.path, now, liveness.held_locks())
        with pytest.raises(UsageError), run.lock_for_training(True):
            pass
    assert not liveness.is_live(run.path, now, liveness.held_locks())
    with run.lock(".go.lock", "is running this pipeline"):  # it prepares to train on
        assert liveness.is_live(run.path, now, liveness.held_locks())
    (run.path / ".lock").write_text("another boot\n")  # of another machine, which may train
    assert liveness.is_live(run.path, now, liveness.held_locks())


def test_looking_does_not_take_the_lock(tmp_path: Path) -> None:
    with made_up.running(tmp_path / "r"):
        pass
    liveness.is_live(tmp_path / "r", time.time(), liveness.held_locks())
    taken = "import fcntl,sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    subprocess.run([sys.executable, "-c", taken, str(tmp_path / "r/.lock")], check=True)


def test_a_run_without_a_lock_is_live_while_it_writes_and_has_no_summary(tmp_path: Path) -> None:
    made_up.run(tmp_path / "open", finished=False)
    made_up.run(tmp_path / "done")
    now = time.time()
    assert liveness.is_live(tmp_path / "open", now, frozenset())
    assert not liveness.is_live(tmp_path / "open", now + 1000, frozenset())
    assert not liveness.is_live(tmp_path / "done", now, frozenset())


def said_to_run() -> Results:
    """Return a study in which the second trial of the first arm is recorded as running, in runs/t."""
    whole = made.results()
    first = whole.arms[0]
    trials = [first.trials[0], Trial(2, "running", run="runs/t"), *first.trials[2:]]
    return replace(whole, arms=[replace(first, trials=trials), *whole.arms[1:]])


def test_a_trial_runs_only_while_it_shows_life(tmp_path: Path) -> None:
    whole = said_to_run()
    with made_up.running(tmp_path / "runs/t"):
        made_up.old(tmp_path / "runs/t")
        assert liveness.mark_interrupted(whole, tmp_path).arms[0].trials[1].status == "running"
    now = liveness.mark_interrupted(whole, tmp_path)
    assert [trial.status for trial in now.arms[0].trials] == ["finished", "interrupted", "finished"]
    assert now.arms[1:] == whole.arms[1:]
    os.utime(tmp_path / "runs/t/metrics.jsonl")
    # it is being written, possibly on another machine
    assert liveness.mark_interrupted(whole, tmp_path) == whole


def test_a_copy_of_a_running_study_does_not_run(tmp_path: Path) -> None:
    whole = said_to_run()
    with made_up.running(tmp_path / "one/runs/t"):
        made_up.old(tmp_path / "one/runs/t")
        shutil.copytree(tmp_path / "one", tmp_path / "copy")
        assert liveness.mark_interrupted(whole, tmp_path / "one").arms[0].trials[1].status == "running"
        assert liveness.mark_interrupted(whole, tmp_path / "copy").arms[0].trials[1].status == "interrupted"


def test_a_study_that_is_run_is_believed_before_its_trial_shows_anything(tmp_path: Path) -> None:
    whole = said_to_run()
    assert liveness.mark_interrupted(whole, tmp_path).arms[0].trials[1].status == "interrupted"
    (tmp_path / ".lock").touch()
    locks = frozenset({(tmp_path / ".lock").stat().st_ino})
    assert liveness.mark_interrupted(whole, tmp_path, locks) == whole


def test_an_arm_whose_trials_were_all_interrupted_says_so() -> None:
    arm = replace(made.results().arms[0], trials=[Trial(1, "interrupted"), Trial(2, "pending")])
    assert arm.status == "interrupted"
