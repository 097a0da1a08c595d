"""Trials on a Ray cluster of two nodes on this machine: the same results as without it, even if a node is killed.

If the head is killed, the study ends with one line, and a new cluster continues it.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deskside.cli.main import main
from deskside.study import results as files
from deskside.study.execute.attempt_lock import attempt_lock, is_idle
from deskside.study.execute.devices import Device
from deskside.study.execute.executor import LocalExecutor
from deskside.study.execute.head_calls import HeadCalls
from deskside.study.execute.ray_executor import UNUSABLE, RayExecutor, RayTrial, TrialSupervisor
from deskside.study.execute.study_folder import StudyFolder
from deskside.study.execute.trial_process import LOST, OUTCOME_FILE, STOPPED, TrialJob
from deskside.utils.errors import RunError
from deskside.utils.machine import code_version
from tests.study import fake_trials
from tests.study.fake_trials import ROOT
from tests.study.ray_cluster import NODE, checkpoints, events, new_cluster, wait_for
from tests.study.test_commands import STUDY

STEPS = 400  # enough steps that a node can be killed before its trial ends
COMPARED = ("val_bpb", "val_loss", "steps", "tokens", "parameters")
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("argv", [["--devices", "0"], []], ids=["devices", "no cluster"])
def test_what_cannot_be_is_one_line(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray looks for a cluster on this machine
    monkeypatch.chdir(tmp_path)
    assert main(["study", "matrix16-quick", "--executor", "ray", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and (argv or ["--executor ray"])[0] in shown.err


def node(name: str, number: int, gpus: float, cpus: float = 16.0, alive: bool = True) -> dict[str, Any]:
    """Return a node as described by ray.nodes()."""
    resources = {"CPU": cpus, "memory": 1e10} | ({"GPU": gpus} if gpus else {})
    return {
        "NodeID": f"{number:06x}".ljust(56, "0"), "NodeManagerHostname": name, "Alive": alive, "Resources": resources
    }  # fmt: skip


def test_each_gpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of a node are divided among its GPUs. Dead nodes and nodes without a GPU get no trial."""
    ray = pytest.importorskip("ray")
    nodes = [node("head", 0, 0), node("a", 1, 2), node("b", 2, 1, 6), node("gone", 3, 4, alive=False)]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def devices(*kinds: str) -> dict[str, str]:
        return {d.name: d.environment["OMP_NUM_THREADS"] for d in RayExecutor(kinds).devices()}

    assert devices("auto", "cpu") == {"cuda:0@a/000001": "8", "cuda:1@a/000001": "8", "cuda:0@b/000002": "6"}
    assert devices("cpu") == {"cpu@head/000000": "16", "cpu@a/000001": "16", "cpu@b/000002": "6"}
    nodes[1:] = []
    assert devices("auto") == {"cpu@head/000000": "16"}
    nodes[0]["Alive"] = False
    with pytest.raises(RunError, match="no node"):
        devices("auto")


def test_every_executor_leaves_a_dead_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search makes two of them in one process, and only the first connects to Ray."""
    ray = pytest.importorskip("ray")
    leaves: list[Any] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="head:6379"))
    monkeypatch.setattr(ray, "nodes", lambda: [node("head", 0, 0)])
    monkeypatch.setattr(atexit, "register", leaves.append)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    _, second = RayExecutor(("cpu",)), RayExecutor(("cpu",))
    second._head.dead = True
    with pytest.raises(SystemExit, match="1"):
        for leave in reversed(leaves):
            leave()


def test_the_supervisor_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs a trial's process, which holds the lock. Other versions and missing folders are named."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/a-s1")
    job = asdict(TrialJob(fake_trials.TARGET, str(run), {"seed": 1}, "", False, 0.8))
    environment = fake_trials.environment(other="steps")

    def outcome(supervisor: TrialSupervisor, code: str = code_version()) -> tuple[str, str]:
        return supervisor.run(job, environment, str(tmp_path), code)[:2]

    status, reason = outcome(TrialSupervisor())
    assert status == UNUSABLE and "does not see" in reason
    (run / "checkpoints").mkdir(parents=True)
    status, reason = outcome(TrialSupervisor(), "0.0.1+other")
    assert status == UNUSABLE and "0.0.1+other" in reason
    supervisor = TrialSupervisor()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(outcome, supervisor)
        wait_for((run / fake_trials.GONE).exists)
        assert not is_idle(run)
        supervisor.stop()
        assert running.result() == ("stopped", "stopped by SIGTERM")
    assert is_idle(run)
    assert outcome(supervisor) == ("stopped", "stopped with the study"), (
        "a trial that was stopped does not start"
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster with one node; tests add and remove the second."""
    with new_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def local(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study as run by this machine alone."""
    return run_study(tmp_path_factory.mktemp("local"), data, "local")


def run_study(folder: Path, data: Path, executor: str) -> Path:
    """Run the study in a folder, and return its directory."""
    process = begin(folder, data, "--executor", executor)
    assert process.wait() == 0, (folder / "err.txt").read_text()
    return folder / "studies" / "tiny"


def begin(folder: Path, data: Path, *argv: str) -> "subprocess.Popen[bytes]":
    """Start `deskside study` in a folder."""
    text = STUDY.format(data=data).replace("steps_per_arm = 12", f"steps_per_arm = {STEPS}")
    (folder / "tiny.toml").write_text(text.replace('"4 steps"', '"40 steps"'))
    command = [sys.executable, "-m", "deskside", "study", "tiny.toml", *argv]
    with (folder / "err.txt").open("ab") as err:
        return subprocess.Popen(
            command, cwd=folder, stdout=err, stderr=err, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )


def measured(study: Path) -> dict[str, dict[str, float]]:
    """Return, by trial, the measurements that must not depend on where it ran."""
    assert files.read(study).complete
    return measured_so_far(study)


def measured_so_far(study: Path) -> dict[str, dict[str, float]]:
    return {
        f"{arm.id}-s{trial.seed}": {name: trial.metrics[name] for name in COMPARED}
        for arm in files.read(study).arms
        for trial in arm.trials
        if trial.status == "finished"
    }


def test_this_machine_waits_for_a_process_on_another(tmp_path: Path) -> None:
    """A study that ran on a cluster may be resumed without it while a lost process still saves."""
    run = tmp_path / "runs" / "a-s1"
    executor = LocalExecutor([])
    executor.wait_until_idle(run)
    assert list(tmp_path.iterdir()) == []
    with ThreadPoolExecutor(1) as pool:
        with attempt_lock(run):
            waiting = pool.submit(executor.wait_until_idle, run)
            time.sleep(0.3)
            assert not waiting.done()
        waiting.result(timeout=60)


class GoneNode:
    """Ray's client for an actor on a node that vanished before the actor started."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("recorded", "status"), [("finished", "finished"), (STOPPED, "failed"), (None, "failed")]
)
def test_a_hung_process_may_have_recorded_its_end(
    recorded: str | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on this machine: it may hang after its trial has finished."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "remote", lambda _: GoneNode())
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(ray, "get", lambda *_, **__: None)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    job = TrialJob("", str(tmp_path), {}, "", False, 1.0)
    trial = RayTrial(job, Device("cpu@a/000000"), {}, HeadCalls("head:6379"))
    if recorded is not None:
        (tmp_path / OUTCOME_FILE).write_text(json.dumps({"status": recorded, "reason": ""}))
    assert trial.kill_hung("no step for 30 minutes").status == status


def test_a_node_that_vanishes_before_the_start_is_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that waits for a GPU is not hung. If its node dies meanwhile, it is lost, not failed."""
    ray = pytest.importorskip("ray")
    state: dict[str, list[Any]] = {"ready": []}

    def get(*_: Any, **__: Any) -> None:
        raise ray.exceptions.ActorUnschedulableError("the node is dead")

    monkeypatch.setattr(ray, "remote", lambda _: GoneNode())
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (state["ready"], refs))
    run = tmp_path / "runs" / "a-s1"
    run.mkdir(parents=True)
    head = HeadCalls("head:6379")
    trial = RayTrial(TrialJob("", str(run), {}, "", False, 0.8), Device("cpu@a", {}), {}, head)
    trial.seconds_without_progress()
    time.sleep(0.05)
    assert trial.poll() is None and trial.seconds_without_progress() == 0
    trial.kill()
    trial._stop_requested = False
    state["ready"] = [object()]
    end = trial.poll()
    assert end is not None and end.status == LOST and "the node is dead" in end.reason and trial.lost


def test_nothing_is_asked_of_ray_once_the_head_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial whose process may still run is stopped, not lost. A trial that has ended is what it recorded itself."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "remote", lambda _: GoneNode())
    head, run = HeadCalls("head:6379"), tmp_path / "runs" / "a-s1"
    run.mkdir(parents=True)
    trial = RayTrial(TrialJob("", str(run), {}, "", False, 0.8), Device("cpu@a", {}), {}, head)
    head.dead = True
    for call in ("wait", "get", "kill"):
        monkeypatch.delattr(ray, call)
    (run / OUTCOME_FILE).write_text('{"status": "finished", "reason": ""}')
    with attempt_lock(run):
        running = trial.poll()
    trial.stop()
    trial.kill()
    ended = trial.poll()
    assert (
        running is not None and ended is not None and (running.status, ended.status) == (STOPPED, "finished")
    )


@pytest.mark.full
def test_a_killed_node_costs_nothing_but_time(cluster: Any, data: Path, local: Path, tmp_path: Path) -> None:
    """Both nodes have a trial. One node is killed, and its trial continues from its checkpoint on the other."""
    second = cluster.add_node(**NODE)
    study = tmp_path / "studies" / "tiny"
    process = begin(tmp_path, data, "--executor", "ray")

    def saved_on_second() -> dict[str, Any] | None:
        here = [event for event in events(study, "started") if second.node_id[:6] in event["device"]]
        return here[0] if here and checkpoints(study, here[0]) else None

    victim = wait_for(saved_on_second)
    cluster.remove_node(second, allow_graceful=False)
    code, told = process.wait(), (tmp_path / "err.txt").read_text()
    assert code == 0, told
    assert "(raylet)" not in told and "[state-dump]" not in told  # Ray's message about the dead node
    started = events(study, "started")
    assert len({event["device"] for event in started}) == 2
    again = [event for event in started if event["arm"] == victim["arm"]]
    assert [event["resumed"] for event in again] == [False, True]
    assert again[0]["device"] != again[1]["device"]
    ended = [event["status"] for event in events(study, "ended") if event["arm"] == victim["arm"]]
    assert ended == ["pending", "finished"]
    assert measured(study) == measured(local) and len(measured(study)) == 2


@pytest.mark.full
def test_a_killed_study_is_resumed(cluster: Any, data: Path, local: Path, tmp_path: Path) -> None:
    """The driver is killed during trials. They save and end by themselves, and --resume continues them."""
    study = tmp_path / "studies" / "tiny"
    process = begin(tmp_path, data, "--executor", "ray")
    wait_for(lambda: (begun := events(study, "started")) and checkpoints(study, begun[0]))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert begin(tmp_path, data, "--executor", "ray", "--resume").wait() == 0, (
        tmp_path / "err.txt"
    ).read_text()
    assert [event["resumed"] for event in events(study, "started")][:2] == [False, True]
    assert measured(study) == measured(local) and len(measured(study)) == 2


@pytest.mark.full
def test_a_stopped_study_saves(cluster: Any, data: Path, tmp_path: Path) -> None:
    study = tmp_path / "studies" / "tiny"
    process = begin(tmp_path, data, "--executor", "ray")
    first = wait_for(
        lambda: (begun := events(study, "started")) and checkpoints(study, begun[0]) and begun[0]
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert [event["status"] for event in events(study, "ended")] == ["pending"]
    assert checkpoints(study, first)
    run = StudyFolder(study).run(first["arm"], first["seed"])
    assert json.loads((run / "trial.json").read_text())["status"] == "stopped"


@pytest.mark.full
@pytest.mark.parametrize("killed", ["server", "all"])
def test_a_dead_head_ends_the_study_with_one_line(killed: str, data: Path, tmp_path: Path) -> None:
    """The second of four trials is running when the head's server, or the whole
    head, dies. A new head finishes the study.
    """
    study, err = tmp_path / "studies" / "tiny", tmp_path / "err.txt"
    options = "--executor", "ray", "--seeds", "2", "--steps-per-arm", "160"
    with new_cluster() as first:
        address = first.address
        process = begin(tmp_path, data, *options)
        wait_for(lambda: len(begun := events(study, "started")) == 2 and checkpoints(study, begun[1]))
        if killed == "server":
            first.head_node.kill_gcs_server()
        else:
            first.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        code = process.wait(timeout=120)
        told = [line for line in err.read_text().splitlines() if line]
        assert code == 1, told
        errors = [
            line for line in told if "deskside: " in line or "rpc_client" in line or "Traceback" in line
        ]
        assert errors == told[-1:] and address in errors[0]
        assert errors[0].endswith("deskside study studies/tiny --resume --executor ray")
    finished = {
        (event["arm"], event["seed"]) for event in events(study, "ended") if event["status"] == "finished"
    }
    before = measured_so_far(study)
    assert finished and len(before) == len(finished) < 4
    with new_cluster():
        assert begin(tmp_path, data, *options, "--resume").wait() == 0, err.read_text()
    after = measured(study)
    assert len(after) == 4 and {name: after[name] for name in before} == before
    starts = [(event["arm"], event["seed"]) for event in events(study, "started")]
    assert all(starts.count(trial) == 1 for trial in finished)
