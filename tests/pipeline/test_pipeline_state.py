"""The clock of the pipeline's hours: it spans processes, stops while nothing
runs, and a kill loses at most one interval.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import deskside
from deskside.pipeline import pipeline_state as journals
from deskside.pipeline.pipeline_state import PHASES, PipelineState, tail_seconds
from deskside.run.directory import RunDirectory
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import TEMPORARY_SUFFIX
from tests.train import tiny_run

OPTIONS: dict[str, object] = {
    "preset": "demo",
    "data": None,
    "given": {},
    "gpu_budget": None,
    "target_loss": None,
    "probes": "probes",
}


def begun(folder: Path, hours: float = 1.0, spent: float = 0.0) -> PipelineState:
    deskside.STARTED = time.perf_counter()
    run = RunDirectory.create(folder, "run", "run")
    return PipelineState.begin(run, hours, dict(OPTIONS), "a test", spent)


def planned(state: PipelineState) -> PipelineState:
    """Fill the pipeline's state with everything that training needs."""
    state.set_result("doctor", {"status": "fit"})
    state.set_result("probe", {"status": "stored"})
    state.set_result("plan", {"status": "skipped", "reason": "a test", "pretrain_seconds": 9.0, "config": {}})
    state.enter("train")
    return state


def again(folder: Path) -> PipelineState:
    deskside.STARTED = time.perf_counter()
    return PipelineState.open(folder / "run")


def test_the_wait_for_an_answer_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    state = begun(tmp_path)
    now[0] += 5
    with state.waiting():
        now[0] += 4000
        assert state.seconds_spent() == 5
        state.save()  # as the saving thread does
    now[0] += 2
    assert state.seconds_spent() == 7
    assert json.loads((tmp_path / "run" / "go.json").read_text())["spent_seconds"] == 5


def test_a_road_that_goes_on_has_what_was_left(tmp_path: Path) -> None:
    first = begun(tmp_path, hours=1.0, spent=100.0)
    deskside.STARTED -= 50.0  # this process began 50 s ago
    first.set_result("doctor", {"status": "fit"})
    first.enter("probe")
    assert first.seconds_left() == pytest.approx(3600 - 150, abs=0.5)
    # The time between the two processes does not count.
    second = again(tmp_path)
    assert second.phase == "probe" and second.result("doctor") == {"status": "fit"}
    assert second.result("probe") == {} and second.data["options"] == OPTIONS
    assert second.seconds_spent() == pytest.approx(150, abs=0.5)
    deskside.STARTED -= 20.0
    assert second.seconds_left() == pytest.approx(3600 - 170, abs=0.5)


def wait_to_be_killed(folder: Path) -> None:
    journals.SAVE_SECONDS = 0.05
    state = begun(folder)
    with state.recording():
        time.sleep(60)


def test_a_kill_keeps_the_time_of_the_last_beat(tmp_path: Path) -> None:
    began = time.monotonic()
    child = tiny_run.call(wait_to_be_killed, tmp_path, log=tmp_path / "log")
    file = tmp_path / "run" / "go.json"

    def spent() -> float:
        return float(json.loads(file.read_text("utf-8"))["spent_seconds"])

    while not file.exists() or spent() < 0.5:
        assert child.alive() and time.monotonic() - began < 60, child.text()
        time.sleep(0.01)
    saved = spent()
    child.kill(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert saved <= spent() < time.monotonic() - began


def hold(folder: Path) -> None:
    with begun(folder).recording():
        (folder / "held").touch()
        time.sleep(60)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    child = tiny_run.call(hold, tmp_path, log=tmp_path / "log")
    while not (tmp_path / "held").exists():
        assert child.alive(), child.text()
        time.sleep(0.01)
    with (
        pytest.raises(UsageError, match="another process is running this pipeline"),
        again(tmp_path).recording(),
    ):
        pass
    child.kill()
    child.wait()
    with again(tmp_path).recording():
        pass


def test_a_full_disk_stops_no_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "SAVE_SECONDS", 0.01)
    state = begun(tmp_path)
    failed: list[str] = []
    original = state.run.write_json

    def refuse(name: str, value: dict[str, object]) -> None:
        if len(failed) < 3:
            failed.append(name)
            raise RunError("the disk is full")
        original(name, value)

    monkeypatch.setattr(state.run, "write_json", refuse)
    with state.recording():
        deadline = time.monotonic() + 60
        while len(failed) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert again(tmp_path).seconds_spent() > 0


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"schema_version": 1, "hours": "two"}),
        json.dumps(
            {
                "schema_version": 2,
                "hours": 1,
                "spent_seconds": 0,
                "phase": "plan",
                "options": {},
                "results": {},
                "command": "x",
            }
        ),
    ],
)
def test_a_damaged_journal(content: str, tmp_path: Path) -> None:
    (tmp_path / "go.json").write_text(content, "utf-8")
    with pytest.raises(RunError, match=r"go\.json: is damaged"):
        PipelineState.open(tmp_path)


def test_what_was_stopped_before_it_began(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "run", "run")
    with pytest.raises(UsageError, match="delete the folder"):
        PipelineState.open(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="no pipeline to resume"):
        PipelineState.open(tmp_path / "run")


def test_what_is_kept_waits_for_the_note_that_is_being_written(tmp_path: Path) -> None:
    """A background thread writes the state regularly, and the state must not change meanwhile."""
    state = begun(tmp_path)
    keeps = [
        threading.Thread(target=state.set_result, args=("doctor", {"status": "fit"})),
        threading.Thread(target=state.enter, args=("probe",)),
    ]
    with state._lock:
        for thread in keeps:
            thread.start()
        time.sleep(0.1)
        assert state.result("doctor") == {} and state.phase == "doctor"
    for thread in keeps:
        thread.join(10)
    assert state.result("doctor") == {"status": "fit"} and again(tmp_path).phase == "probe"


def test_the_other_run_lies_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is found from any directory, and after both runs were moved."""
    monkeypatch.chdir(tmp_path)
    state = planned(begun(Path("runs")))
    assert state.continued_in is None
    state.continue_in(RunDirectory.create(Path("runs"), "other", "other"))
    (tmp_path / "runs").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved" / "run")
    assert again(tmp_path / "moved").continued_in == tmp_path / "moved" / "other"


def test_no_journal(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no go\.json"):
        PipelineState.open(tmp_path)


def test_phases_are_in_order_and_the_file_is_whole_at_any_moment(tmp_path: Path) -> None:
    state = begun(tmp_path)
    for phase in PHASES:
        state.enter(phase)
        assert json.loads((tmp_path / "run" / "go.json").read_text("utf-8"))["phase"] == phase
    assert not [name for name in os.listdir(tmp_path / "run") if name.endswith(TEMPORARY_SUFFIX)]


def test_a_busy_machine_keeps_more_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    for load, factor in ((0.1, 1.0), (2.5, 2.5), (50.0, 4.0)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load * cores, 0.0, 0.0))
        assert tail_seconds(0.05) == pytest.approx(6.0 * factor + 0.9)
