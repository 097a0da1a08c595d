"""Checkpoints written during training: the same bytes, and kills, errors and stops while one is written."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deskside.config.run import RunConfig
from deskside.run.directory import RunDirectory
from deskside.train import run_execution
from deskside.train.loop.clock import Clock
from deskside.train.state import checkpointer
from deskside.train.state.checkpointer import Checkpointer
from deskside.train.state.staging import Staging
from deskside.utils.errors import RunError, UsageError
from deskside.weights import checkpoint as files
from deskside.weights.checkpoint_folder import MANIFEST, SHARDED, files_of, find
from tests.train import tiny_run
from tests.train.test_faults import command_like
from tests.train.tiny_run import curve, events, plan, rows

SLOWER = {"sequence_length": 32, "tokens": 1024}
LENGTH = {"length": "40 steps"}


def wait_for_step(run: Path, step: int) -> None:
    """Wait in a thread that writes until training has logged a later step."""
    assert threading.current_thread() is not threading.main_thread()
    deadline = time.monotonic() + 60
    while not (logged := rows(run)) or logged[-1]["step"] < step:
        assert time.monotonic() < deadline, f"training waits at step {logged and logged[-1]['step']}"
        time.sleep(0.001)


def intercept_save(step: int, before: Callable[[Path], object]) -> None:
    """Call `before` with the run's path in the writing thread, before it writes the checkpoint of `step`."""
    original = files.save

    def save(folder: Path, at: int, *args: Any) -> Any:
        if at == step:
            before(folder.parent)
        return original(folder, at, *args)

    files.save = save


class TrainingWaits:
    """Tells the writing thread when training begins and ends to wait for it.

    A write therefore takes exactly as long as a test needs, on a machine of any speed.
    """

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        original = Checkpointer.finish

        def finish(checkpointer: Checkpointer) -> None:
            self.ended.clear()
            try:
                self.begun.set()
                original(checkpointer)
            finally:
                self.begun.clear()
                self.ended.set()

        Checkpointer.finish = finish  # type: ignore[method-assign]

    def until_begun(self, *_: object) -> None:
        assert self.begun.wait(60), "training does not wait"

    def until_ended(self) -> None:
        assert self.ended.wait(60), "training still waits"


def signal_at(step: int, number: int) -> None:
    """Send a signal from training's own thread when it logs `step`, thus during the next step."""
    original = RunDirectory.append_metrics

    def append(self: RunDirectory, row: dict[str, Any]) -> None:
        original(self, row)
        if row["step"] == step:
            signal.raise_signal(number)

    RunDirectory.append_metrics = append  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def functions_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "save", files.save)
    monkeypatch.setattr(Checkpointer, "finish", Checkpointer.finish)
    monkeypatch.setattr(RunDirectory, "append_metrics", RunDirectory.append_metrics)


# The same bytes


def train_with_late_writes(root: Path, config: RunConfig, name: str) -> None:
    """Write the checkpoints of steps 10 to 30 only after three more steps have changed everything."""
    Clock.seconds = lambda self: 0.0  # type: ignore[method-assign]  # the only part of a checkpoint that may differ
    if config.checkpoint.background:
        for step in (10, 20, 30):
            intercept_save(step, lambda run, step=step: wait_for_step(run, step + 3))  # type: ignore[misc]
    tiny_run.train(root, config, name)


def contents(folder: Path) -> dict[str, Any]:
    """Return the content of every file by its path. Shards have metadata in
    random order, so their headers are parsed.
    """
    result: dict[str, Any] = {}
    for checkpoint in find(folder):
        files.verify(checkpoint)
        for path in files_of(checkpoint.path):
            content: Any = path.read_bytes()
            if path.parent.name == SHARDED:
                end = 8 + int.from_bytes(content[:8], "little")
                content = (json.loads(content[8:end]), content[end:])
            elif path.name == MANIFEST and checkpoint.sharded:
                continue  # has the checksums of the shards
            result[str(path.relative_to(folder))] = content
    return result


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDER = {"hidden_size": 64, "intermediate_size": 128}  # matrices that are updated one at a time
ON_HOST = {"offload": True, "weights": "bfloat16"}


@pytest.mark.parametrize(
    "changes, ranks",
    [
        pytest.param(
            {"optim": {"name": "muon"}, "precision": {"name": "fp8-delayed", "keep_first": 0.0}},
            1,
            marks=pytest.mark.full,
        ),
        (
            {
                "model": WIDER,
                "optim": {
                    **ON_HOST,
                    "name": "adamw",
                    "states": "4bit",
                    "gradients": "host",
                    "master_weights": True,
                },
            },
            1,
        ),
        pytest.param({"optim": {"name": "adamw"}, "parallel": {"mode": "shard"}}, 2, marks=pytest.mark.full),
        pytest.param({"optim": {"name": "muon"}}, 2, marks=pytest.mark.full),
        pytest.param({"optim": {"name": "muon"}, "parallel": {"mode": "shard"}}, 2, marks=pytest.mark.full),
        pytest.param(
            {"model": EXPERTS, "optim": {**ON_HOST, "name": "adamw", "states": "8bit"}},
            1,
            marks=pytest.mark.full,
        ),
    ],
)
def test_written_later_it_is_the_same_byte_for_byte(
    changes: dict[str, Any], ranks: int, data: Path, tmp_path: Path
) -> None:
    found = {}
    for background in (True, False):
        checkpoint = {"background": background, "keep": 10}
        config = tiny_run.config(data, schedule=LENGTH, checkpoint=checkpoint, **changes)
        name = f"background-{background}".lower()
        log = tmp_path / f"{name}.log"
        child = tiny_run.call(train_with_late_writes, tmp_path, config, name, log=log, ranks=ranks)
        assert child.wait() == 0, child.text()
        found[background] = contents(tmp_path / name / "checkpoints")
        copied = [row["step"] for row in rows(tmp_path / name) if "checkpoint_copy_seconds" in row]
        assert copied == ([1, 11, 21, 31] if background else [])
        written = [row["step"] for row in rows(tmp_path / name) if "checkpoint_write_seconds" in row]
        assert written[1] > 13 if background else written == [1, 11, 21, 31]
    assert found[True] == found[False] and len(found[True]) >= 3 * 5


def test_staging_copies_every_kind_of_tensor() -> None:
    torch.manual_seed(0)
    group = {
        "transposed": torch.randn(5, 7).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "bytes": torch.randint(0, 255, (13,), dtype=torch.uint8),
        "bfloat16": torch.randn(3, 3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    groups = [group, {"same name": torch.randn(9)}]
    place = Staging(groups, torch.device("cpu"))
    expected = [{name: t.clone() for name, t in tensors.items()} for tensors in groups]
    copies = place.copy(groups)
    for tensors in groups:
        for tensor in tensors.values():
            tensor.zero_()
    for copied, wanted in zip(copies, expected, strict=True):
        assert copied.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(copied[name], tensor) and copied[name].dtype == tensor.dtype
    addresses = [t.data_ptr() for tensors in copies for t in tensors.values()]
    again = place.copy(groups)
    assert [t.data_ptr() for tensors in again for t in tensors.values()] == addresses
    assert not any(t.any() for tensors in again for t in tensors.values())


def test_one_file_holds_tensors_that_share_the_staging_memory(tmp_path: Path) -> None:
    group = {f"t{i}": torch.randn(i + 1) for i in range(5)}
    save_file(Staging([group], torch.device("cpu")).copy([group])[0], tmp_path / "file")
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == group.keys() and all(torch.equal(loaded[k], group[k]) for k in group)


# Kills while a checkpoint is written

POINTS: dict[str, tuple[Any, str]] = {
    "tensors": (files, "save_file"),
    "checksums": (files, "fingerprint"),
    "flush": (os, "fsync"),
    "rename": (os, "replace"),
    "deletion of the old": (shutil, "rmtree"),
}
RESUMED_AT = {"deletion of the old": 20}  # at the other points, the checkpoint of step 20 is not published


def killed_at(root: Path, config: RunConfig, point: str) -> None:
    """Train until this process is killed at `point` of writing step 20, and after step 23."""
    module, name = POINTS[point]
    original = getattr(module, name)
    writing: list[Path] = []

    def operation(*args: Any, **options: Any) -> Any:
        if writing and threading.current_thread() is not threading.main_thread():
            wait_for_step(writing[0], 23)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(module, name, operation)
    intercept_save(20, writing.append)
    tiny_run.train(root, config)


EVERY_RUN = ("tensors", "deletion of the old")


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point in EVERY_RUN else pytest.mark.full) for point in POINTS]
)
def test_a_kill_while_a_checkpoint_is_written(point: str, data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, schedule=LENGTH, checkpoint={"keep": 1})
    child = tiny_run.call(killed_at, tmp_path, config, point, log=tmp_path / "log")
    assert child.wait() == -signal.SIGKILL, child.text()
    run = tmp_path / "run"
    assert rows(run)[-1]["step"] >= 23
    assert any((run / "checkpoints").glob(".tmp-*"))
    again = tiny_run.resume(run).run.path
    assert f"resumed at step {RESUMED_AT.get(point, 10)};" in events(run)
    straight = tiny_run.train(tmp_path, config, "straight").run.path
    assert curve(again) == curve(straight)
    assert tiny_run.checkpoints(again) == tiny_run.checkpoints(straight) == ["step-000000040"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = f"checkpoints/step-000000040/{name}"
        assert (again / last).read_bytes() == (straight / last).read_bytes()


# Errors and stops while a checkpoint is written


def fail(run: Path) -> None:
    wait_for_step(run, 12)
    raise RunError("the disk is full")


def test_an_error_ends_the_run_within_a_step(data: Path, tmp_path: Path) -> None:
    intercept_save(10, fail)
    with pytest.raises(RunError, match="the disk is full"):
        tiny_run.train(tmp_path, tiny_run.config(data, batch=SLOWER, schedule={"length": "1000 steps"}))
    # In a busy process, a few steps pass before the thread sees step 12 in the file.
    assert 12 <= rows(tmp_path / "run")[-1]["step"] < 500
    assert tiny_run.checkpoints(tmp_path / "run") == ["step-000000000"]


class Stopped(BaseException):
    """Ends a run in this process without a signal."""


@pytest.mark.parametrize("background, saves", [("auto", 3), (False, 2)])
def test_time_is_left_for_a_checkpoint_that_is_still_written_at_the_end(
    background: Any, saves: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is reserved for it, in addition to the last checkpoint and the export."""
    reserved: list[float] = []

    def stop(stepper: Any, stages: Any, length: Any, *given: Any, **options: Any) -> None:
        execution = length.reserve.__self__
        for execution.save_seconds in (1.0, 2.0):
            reserved.append(length.reserve())
        raise Stopped

    monkeypatch.setattr(run_execution, "Trainer", stop)
    config = tiny_run.config(data, schedule={"length": "1h"}, checkpoint={"background": background})
    with pytest.raises(Stopped):
        tiny_run.train(tmp_path, config)
    assert reserved[1] - reserved[0] == pytest.approx(saves)


@pytest.mark.parametrize(("write_fails", "event_fails"), [(False, False), (True, False), (True, True)])
def test_a_run_that_fails_meanwhile_waits_for_the_checkpoint(
    write_fails: bool,
    event_fails: bool,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run's error is raised, and the checkpoint's error is printed before it."""
    failed, append_metrics, event = threading.Event(), RunDirectory.append_metrics, RunDirectory.event

    def write_event(self: RunDirectory, text: str) -> None:
        if event_fails and failed.is_set():
            raise RunError("no space for the event")
        event(self, text)

    def append(self: RunDirectory, row: dict[str, Any]) -> None:
        append_metrics(self, row)
        if row["step"] == 12:
            failed.set()
            raise Stopped

    def write(run: Path) -> None:
        assert failed.wait(60)
        time.sleep(0.2)
        if write_fails:
            raise RunError("the disk is full")

    monkeypatch.setattr(RunDirectory, "append_metrics", append)
    monkeypatch.setattr(RunDirectory, "event", write_event)
    intercept_save(10, write)
    with pytest.raises(Stopped):
        tiny_run.train(tmp_path, tiny_run.config(data))
    run = tmp_path / "run"
    assert tiny_run.checkpoints(run) == ["step-000000000", *([] if write_fails else ["step-000000010"])]
    for checkpoint in find(run / "checkpoints"):
        files.verify(checkpoint)
    assert ("the disk is full" in events(run)) == (write_fails and not event_fails)
    assert ("the disk is full" in capsys.readouterr().err) == write_fails


def test_a_stop_waits_until_the_checkpoint_is_published(data: Path, tmp_path: Path) -> None:
    """The stop is requested in step 13 while step 10 is written. The run saves
    step 13 afterwards, and both are complete.
    """
    intercept_save(10, TrainingWaits().until_begun)
    signal_at(12, signal.SIGTERM)
    outcome = tiny_run.train(tmp_path, tiny_run.config(data))
    found = find(tmp_path / "run" / "checkpoints")
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert [c.step for c in found] == [rows(tmp_path / "run")[-1]["step"], 10] == [13, 10]
    for checkpoint in found:
        files.verify(checkpoint)


def interrupted_twice(root: Path, config: RunConfig, write_fails: bool) -> None:
    """Interrupt the run while step 10 is written, and again while it waits for that write to save its last step."""
    waits = TrainingWaits()

    def interrupt(run: Path) -> None:
        waits.until_begun()
        os.kill(os.getpid(), signal.SIGINT)
        waits.until_ended()
        if write_fails:
            raise RunError("the disk is full")

    signal_at(12, signal.SIGINT)
    intercept_save(10, interrupt)
    command_like(root, config)


@pytest.mark.parametrize("write_fails", [False, True])
def test_a_second_interrupt_saves_no_further_step(write_fails: bool, data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data)
    child = tiny_run.call(interrupted_twice, tmp_path, config, write_fails, log=tmp_path / "log")
    assert child.wait() == 128 + signal.SIGINT, child.text()
    lines = [
        line for line in child.text().splitlines() if not line.startswith(("warning: ", "trains ", "step "))
    ]
    *before, last = lines
    assert before == (["the disk is full"] if write_fails else [])
    assert last.startswith("interrupted; ") and f"deskside train --resume {tmp_path / 'run'}" in last
    checkpoints = find(tmp_path / "run" / "checkpoints")
    assert [c.step for c in checkpoints] == ([0] if write_fails else [10, 0])
    for checkpoint in checkpoints:
        files.verify(checkpoint)


def test_training_waits_for_slow_writes_and_says_so_once(data: Path, tmp_path: Path) -> None:
    waits = TrainingWaits()
    for step in (2, 4, 6):
        intercept_save(step, waits.until_begun)
    config = tiny_run.config(data, schedule={"length": "8 steps"}, checkpoint={"every": "2 steps", "keep": 9})
    run = tiny_run.train(tmp_path, config).run.path
    assert tiny_run.checkpoints(run) == [f"step-{step:09d}" for step in range(0, 9, 2)]
    assert events(run).count("is still being written") == 1


# Memory


def test_without_the_memory_training_waits_and_says_why(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "usable_bytes", lambda: 100_000)
    finished = {}
    for background in ("auto", False):
        config = tiny_run.config(data, schedule=LENGTH, checkpoint={"background": background})
        finished[background] = run = tiny_run.train(tmp_path, config, f"{background}").run.path
        assert not any("checkpoint_copy_seconds" in row for row in rows(run))
        assert plan(run)["foreground_checkpoints"] is not None
    assert events(finished["auto"]).count("training waits while checkpoints are written (") == 1
    with pytest.raises(UsageError, match=r"checkpoint\.background: .* --checkpoint\.background false"):
        tiny_run.train(tmp_path, tiny_run.config(data, checkpoint={"background": True}), "true")
    monkeypatch.setattr(checkpointer, "usable_bytes", lambda: None)  # unknown
    run = tiny_run.train(tmp_path, tiny_run.config(data, schedule=LENGTH), "unknown").run.path
    assert plan(run)["foreground_checkpoints"] is None
    assert any("checkpoint_copy_seconds" in row for row in rows(run))
    assert curve(run) == curve(finished["auto"]) == curve(finished[False])


def train_with_less_memory_for_the_second(root: Path, config: RunConfig) -> None:
    """Rank 0 has already allocated its part when rank 1 measures the free memory."""
    checkpointer.usable_bytes = lambda: None if os.environ["RANK"] == "0" else 100  # type: ignore[assignment]
    tiny_run.train(root, config)


@pytest.mark.full
def test_shards_do_not_count_the_memory_of_the_first_twice(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(
        data, optim={"name": "adamw"}, parallel={"mode": "shard"}, schedule={"length": "2 steps"}
    )
    log = tmp_path / "log"
    child = tiny_run.call(train_with_less_memory_for_the_second, tmp_path, config, log=log, ranks=2)
    assert child.wait() == 0, child.text()
    assert plan(tmp_path / "run")["foreground_checkpoints"] is None
