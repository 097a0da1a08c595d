"""A study that is stopped, killed or out of disk space: nothing continues to
train, and nothing is repeated or lost.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deskside.cli.main import main
from deskside.study import results as files
from deskside.study.execute.journal import FILE, replay_file
from deskside.study.execute.runner import max_silence
from deskside.study.execute.study_folder import StudyFolder
from deskside.utils.errors import RunError
from tests.study import tiny_study
from tests.study.fake_trials import GONE, ROOT

# A study in a separate process, which can be stopped and killed.
DRIVER = """
import sys
from pathlib import Path
from deskside.study.execute.study_folder import StudyFolder
from tests.study import tiny_study

folder = StudyFolder(Path(sys.argv[1]))
with folder.lock(print) as lock:
    runner = tiny_study.runner(folder, devices=int(sys.argv[2]), lock=lock, other=sys.argv[3])
    print("stopped by", runner.run(runner.remaining()), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    return tiny_study.begin(tmp_path / "study")


@pytest.fixture
def drive(folder: StudyFolder) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start studies, and end what is left of them after the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(devices: int, act: str) -> "subprocess.Popen[str]":
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(folder.path), str(devices), act],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def going(folder: StudyFolder) -> list[Path]:
    """Return the trials that have done a step."""
    return sorted((folder.path / "runs").glob(f"*/{GONE}"))


def pids(folder: StudyFolder) -> list[int]:
    lines = (folder.path / FILE).read_text().splitlines()
    return [event["pid"] for event in map(json.loads, lines) if event["event"] == "started"]


def alive(pid: int) -> bool:
    """Return True if a process is running and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def statuses(folder: StudyFolder) -> list[str]:
    return [trial.status for arm in files.read(folder.path).arms for trial in arm.trials]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGHUP, marks=pytest.mark.full),
    ],
)
def test_a_signal_saves_what_runs_and_stops(
    number: signal.Signals, folder: StudyFolder, drive: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = drive(2, "steps")
    wait_for(lambda: len(going(folder)) == 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and f"stopped by {number.name}" in out
    assert not any(alive(pid) for pid in pids(folder))
    assert statuses(folder) == ["pending"] * 4 and not files.read(folder.path).complete
    reasons = {one.reason for one in replay_file(folder.path / FILE).values()}
    assert reasons == {"stopped by SIGTERM"}  # this is what the study sends its trials
    # These continue from what they saved; the others begin.
    runner = tiny_study.runner(folder, devices=2, other="steps", depth_two__tied_no__s1="finish")
    todo = runner.remaining()
    assert len(todo) == 4
    resumed = [path.parent.name for path in going(folder)]
    runner.run([trial for trial in todo if f"{trial[0].id}-s1" in resumed])
    past = replay_file(folder.path / FILE)
    assert {past[name.removesuffix("-s1"), 1].status for name in resumed} == {"finished"}
    assert all(past[name.removesuffix("-s1"), 1].attempts == 2 for name in resumed)


def test_kill_9_of_the_study_ends_its_trials_and_a_resume_waits_for_them(
    folder: StudyFolder, drive: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = drive(2, "steps")
    wait_for(lambda: len(going(folder)) == 2)
    process.kill()
    process.wait()
    # The resume starts at once, and must not touch a run before its training process has released it.
    with folder.lock(lambda text: None):
        assert not any(alive(pid) for pid in pids(folder))
        runner = tiny_study.runner(folder, devices=2)
        assert len(runner.remaining()) == 4
        runner.run(runner.remaining())
    assert statuses(folder) == ["finished"] * 4
    attempts = sorted(one.attempts for one in replay_file(folder.path / FILE).values())
    assert attempts == [1, 1, 2, 2]
    # The saved steps of a trial are not repeated: the file still has those of its first process.
    assert len(going(folder)) == 2


def test_trials_of_a_killed_study_are_listed_as_interrupted(
    folder: StudyFolder, drive: Callable[..., "subprocess.Popen[str]"], capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> list[str]:
        assert main(["study", str(folder.path), "--dry-run", "--json"]) == 0
        return sorted(row["status"] for row in json.loads(capsys.readouterr().out)["trials"])

    process = drive(2, "steps")
    wait_for(lambda: len(going(folder)) == 2)
    assert listed() == ["pending", "pending", "running", "running"]
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids(folder)))
    for path in (folder.path / "runs").rglob("*"):
        os.utime(path, (0, 0))  # without a lock, a run that has just written counts as live
    assert listed() == ["interrupted", "interrupted", "pending", "pending"]


def test_kill_9_repeats_nothing_that_is_done(
    folder: StudyFolder, drive: Callable[..., "subprocess.Popen[str]"]
) -> None:
    first = drive(1, "finish")
    wait_for(lambda: (folder.path / "results.json").exists() and "finished" in statuses(folder))
    first.kill()
    first.wait()
    with folder.lock(lambda text: None):
        before = {key for key, one in replay_file(folder.path / FILE).items() if one.status == "finished"}
        runner = tiny_study.runner(folder)
        runner.run(runner.remaining())
    past = replay_file(folder.path / FILE)
    assert statuses(folder) == ["finished"] * 4 and before
    assert all(past[key].attempts == 1 for key in before)
    assert sum(one.attempts for one in past.values()) <= 5


def test_a_second_ctrl_c_ends_everything_at_once(
    folder: StudyFolder, drive: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = drive(2, "deaf")
    wait_for(lambda: len(list((folder.path / "runs").glob("*/run.json"))) == 2)
    time.sleep(0.3)  # until they lose contact
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it waits for them
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not any(alive(pid) for pid in pids(folder))
    assert statuses(folder) == ["pending"] * 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("a file system cannot be mounted here: no mount")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_indeed(small_disk: Path) -> None:
    folder = tiny_study.begin(small_disk / "study")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    runner = tiny_study.runner(folder)
    with pytest.raises(RunError, match="No space left on device"):
        runner.run(runner.remaining())
    filler.unlink()
    again = tiny_study.runner(folder)
    again.run(again.remaining())
    assert statuses(folder) == ["finished"] * 4


def test_a_trial_that_hangs_is_ended_and_the_study_goes_on(
    folder: StudyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deskside.study.execute.runner.max_silence", lambda device, forecast: 3.0)
    acts = {"depth_two__tied_no__s1": "deaf", "depth_two__tied_yes__s1": "hang-at-exit"}
    runner = tiny_study.runner(folder, devices=2, **acts)
    assert runner.run(runner.remaining()) is None
    assert not any(alive(pid) for pid in pids(folder))
    past = {arm: one for (arm, _), one in replay_file(folder.path / FILE).items()}
    assert past["depth_two-tied_no"].status == "failed"
    assert past["depth_two-tied_no"].reason == "no step for 0 minutes; the trial was killed"
    # It had reported its end, and only its process kept running.
    assert past["depth_two-tied_yes"].status == "finished"
    assert sorted(statuses(folder)) == ["failed"] + 3 * ["finished"]


@pytest.mark.full
def test_a_slow_trial_is_not_ended_as_long_as_it_logs(
    folder: StudyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deskside.study.execute.runner.max_silence", lambda device, forecast: 3.0)
    runner = tiny_study.runner(folder, other="slow")
    assert runner.run(runner.remaining()[:1]) is None
    [one] = replay_file(folder.path / FILE).values()
    assert one.status == "finished" and (one.seconds or 0) > 4


def test_silence_is_generous_and_grows_with_what_is_expected() -> None:
    assert max_silence("cuda:1", 600.0) == 1800 + 3 * 600
    assert max_silence("cuda:0", None) == max_silence("cpu", None) == 6 * 3600  # nothing is known
    assert max_silence("cpu", 600.0) > max_silence("cuda:0", 600.0)
