"""Kills at random moments, damaged checkpoints and full disks: the run resumes and ends like an undisturbed one."""

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deskside.config.run import RunConfig
from deskside.run.directory import RunDirectory
from deskside.utils.errors import RunError
from deskside.utils.files import fingerprint
from deskside.weights import checkpoint as files
from deskside.weights.checkpoint_folder import find
from tests.train import tiny_run
from tests.train.tiny_run import curve, rows

RESUME = ["train", "--resume"]


def first(folder: Path, name: str, config: object, log: Path, ranks: int) -> tiny_run.Child:
    return tiny_run.call(tiny_run.train, folder, config, name, log=log, ranks=ranks)


def resumed(run: Path, log: Path, ranks: int) -> tiny_run.Child:
    return tiny_run.call(tiny_run.resume, run, log=log, ranks=ranks)


def wait_for(true: Callable[[], bool], child: tiny_run.Child, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true() and child.alive():
        assert time.monotonic() < end, child.text()
        time.sleep(0.001)


# Kills at random moments


@pytest.mark.parametrize(
    "kills, ranks",
    [(2, 1), pytest.param(50, 1, marks=pytest.mark.full), pytest.param(20, 2, marks=pytest.mark.full)],
)
def test_kills_at_random_moments(kills: int, ranks: int, data: Path, tmp_path: Path) -> None:
    """A checkpoint is written at every step, so about every second kill falls into a write."""
    rng = random.Random(kills)
    config = tiny_run.config(
        data,
        schedule={"length": f"{6 * kills + 25} steps"},
        checkpoint={"every": "1 steps", "keep": 1, "keep_every": "50 steps"},
    )
    log, run = tmp_path / "log", tmp_path / "run"
    done, interrupted = 0, 0
    child = first(tmp_path, "run", config, log, ranks)
    for _ in range(kills):
        seen = len(rows(run))
        if rng.random() < 0.15:  # during the start, which truncates the metrics and reads the checkpoint
            time.sleep(rng.uniform(0.0, 0.4))
        else:
            wait_for(lambda seen=seen: len(rows(run)) > seen, child)  # type: ignore[misc]
            time.sleep(rng.uniform(0.0, 0.1))
        child.kill()
        assert child.wait() == -signal.SIGKILL, child.text()
        if not (run / "run.json").exists():  # killed before there was a run
            shutil.rmtree(run, ignore_errors=True)
            child = first(tmp_path, "run", config, log, ranks)
            continue
        interrupted += any((run / "checkpoints").glob(".tmp-step-*"))
        steps = [r["step"] for r in rows(run)]
        assert steps == list(range(1, len(steps) + 1))
        good = files.newest_good(run / "checkpoints", lambda text: pytest.fail(text))
        if steps:
            # A step is logged after the previous step's checkpoint was begun, and a checkpoint is begun after the one
            # before it is published.
            assert good is not None and good.step >= steps[-1] - 2
        assert (good.step if good else 0) >= done
        done = good.step if good else 0
        child = resumed(run, log, ranks)
    assert child.wait(300) == 0, child.text()
    assert "Traceback" not in child.text() and "not used" not in tiny_run.events(run)
    if kills >= 50:
        assert interrupted >= 5
    straight = tmp_path / "straight"
    assert first(tmp_path, "straight", config, tmp_path / "straight.log", ranks).wait() == 0
    assert curve(run) == curve(straight)
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (straight / weights).read_bytes()
    assert tiny_run.checkpoints(run) == tiny_run.checkpoints(straight)


# A lost terminal


def with_lost_output(how: str, root: Path, config: RunConfig) -> None:
    """Run `command_like` with standard output and standard error on a pipe that nobody reads, or on a full disk."""
    if how == "pipe":
        reading, lost = os.pipe()
        os.close(reading)
    else:
        lost = os.open("/dev/full", os.O_WRONLY)
    for number in (1, 2):
        os.dup2(lost, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # the old streams remember a file
    command_like(root, config)


@pytest.mark.parametrize("how", ["pipe", "full disk"])
def test_a_run_goes_on_when_nobody_listens(how: str, data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, schedule={"length": "20 steps"})
    child = tiny_run.call(with_lost_output, how, tmp_path, config, log=tmp_path / "log")
    assert child.wait() == 0 and child.text() == ""
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == len(rows(run)) == 20
    assert tiny_run.checkpoints(run)[-1] == "step-000000020"


# Damaged files


class Stopped(BaseException):
    """Ends a run in this process like a kill."""


@pytest.fixture(scope="module")
def broken_off(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps that was stopped at step 25, with checkpoints of steps 10
    and 20, and its uninterrupted twin.
    """
    folder = tmp_path_factory.mktemp("broken")
    config = tiny_run.config(data, schedule={"length": "30 steps"})
    tiny_run.train(folder, config, "straight")
    original = RunDirectory.append_metrics

    def append_metrics(self: RunDirectory, row: dict[str, object]) -> None:
        original(self, row)
        if row["step"] == 25:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "append_metrics", append_metrics)
        with pytest.raises(Stopped):
            tiny_run.train(folder, config, "run")
    assert tiny_run.checkpoints(folder / "run") == ["step-000000010", "step-000000020"]
    return folder


def copy(broken_off: Path, tmp_path: Path) -> Path:
    shutil.copytree(broken_off / "run", tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path, seed: int) -> None:
    content = bytearray(path.read_bytes())
    rng = random.Random(seed)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path: flip(path, 3),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    "name, how",
    [
        # make test-full covers all of them. Here, every file occurs once and every kind of damage once.
        pytest.param(name, how, marks=[] if number % len(DAMAGE) == file % len(DAMAGE) else pytest.mark.full)
        for file, name in enumerate(
            ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
        )
        for number, how in enumerate(DAMAGE)
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(
    name: str, how: str, broken_off: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = copy(broken_off, tmp_path)
    damaged = run / "checkpoints" / "step-000000020" / name
    DAMAGE[how](damaged)
    tiny_run.resume(run)
    for told in (" ".join(capfd.readouterr().err.split()), tiny_run.events(run)):
        assert "checkpoint of step 20 is not used" in told and "resumed at step 10" in told
    # A flipped bit in the manifest, in a name or a checksum, may make another file seem wrong.
    assert f"step-000000020/{'' if name == 'manifest.json' else name}" in tiny_run.events(run)
    assert curve(run) == curve(broken_off / "straight")
    assert tiny_run.checkpoints(run) == ["damaged-step-000000020", "step-000000020", "step-000000030"]


def test_all_damaged_stops_and_names_them(broken_off: Path, tmp_path: Path) -> None:
    run = copy(broken_off, tmp_path)
    for checkpoint in find(run / "checkpoints"):
        flip(checkpoint.path / "model.safetensors", 1)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "events.log"}
    child = tiny_run.command([*RESUME, str(run)], tmp_path / "log")
    assert child.wait() == 1
    assert "step-000000020, step-000000010 are damaged" in child.text() and "Traceback" not in child.text()
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "events.log"}


@pytest.mark.parametrize("emptied", [True, False])
def test_without_its_checkpoints_a_run_keeps_its_metrics(
    emptied: bool, broken_off: Path, tmp_path: Path
) -> None:
    run = copy(broken_off, tmp_path)
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    if emptied:
        (run / "checkpoints").mkdir()
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        RunError, match=r"checkpoints: contains no checkpoint, but metrics\.jsonl has 25 steps"
    ):
        tiny_run.resume(run)
    assert (run / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (tmp_path / "elsewhere").rename(run / "checkpoints")
    tiny_run.resume(run)
    assert curve(run) == curve(broken_off / "straight")


def test_stopped_before_the_first_checkpoint_it_starts_over(broken_off: Path, tmp_path: Path) -> None:
    run = copy(broken_off, tmp_path)
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    tiny_run.resume(run)
    assert "there is no checkpoint: starting from the beginning" in tiny_run.events(run)
    assert curve(run) == curve(broken_off / "straight")


STATES = [("step", 19), ("step", -1), ("schema_version", 2), ("rows", []), ("rows", {"x": 1}),
          ("rows", {"32": -1}), ("guard", 3), ("guard", {"norms": [[1]], "in_a_row": 0}), ("optimizer", None),
          ("clock_seconds", "soon"), ("tokens", None), ("extra", 1)]  # fmt: skip


@pytest.mark.parametrize("key, value", STATES)
def test_a_state_that_was_edited_is_named(key: str, value: object, broken_off: Path, tmp_path: Path) -> None:
    """The manifest was edited too, so its checksum matches."""
    run = copy(broken_off, tmp_path)
    path = run / "checkpoints" / "step-000000020"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, key: value}))
    manifest = json.loads((path / "manifest.json").read_text())
    bytes_, checksum = fingerprint(path / "state.json")
    manifest["files"]["state.json"] = {"bytes": bytes_, "xxh3_128": checksum}
    (path / "manifest.json").write_text(json.dumps(manifest))
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"step-000000020/state\.json: ") as caught:
        tiny_run.resume(run)
    assert "\n" not in str(caught.value) and (run / "metrics.jsonl").read_bytes() == before


def test_a_half_line_is_cut_and_a_damaged_one_named(broken_off: Path, tmp_path: Path) -> None:
    run = copy(broken_off, tmp_path)
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 26, "lo')
    tiny_run.resume(run)
    assert curve(run) == curve(broken_off / "straight")

    other = copy(broken_off, tmp_path / "other")
    (other / "metrics.jsonl").write_bytes(whole.replace(b'{"step": 7,', b'{"step": 7\xff', 1))
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 7 is damaged"):
        tiny_run.resume(other)


@pytest.mark.parametrize("name", ["run.json", "plan.json"])
def test_damaged_json_of_the_run_is_named(name: str, broken_off: Path, tmp_path: Path) -> None:
    run = copy(broken_off, tmp_path)
    os.truncate(run / name, 40)
    child = tiny_run.command([*RESUME, str(run)], tmp_path / "log")
    assert child.wait() == 1
    assert name in child.text() and "is damaged" in child.text() and child.text().count("\n") == 1


# A full disk


def limited(root: Path, config: RunConfig, what: str) -> None:
    """Run with a limit that stops writes of `what` after the checkpoint of step
    10: files have a maximum size from then on.
    """
    original = files.save

    def refuse(temporary: Path, final: Path, state: Any) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    def save(folder: Path, step: int, *args: Any) -> Any:
        made = original(folder, step, *args)
        if step == 10 and what == "state.json":
            files._finish = refuse
        elif step == 10:
            size = {"metrics": (folder.parent / "metrics.jsonl").stat().st_size + 400, "tensors": 20_000}
            resource.setrlimit(resource.RLIMIT_FSIZE, (size[what], resource.RLIM_INFINITY))
        return made

    files.save = save
    command_like(root, config)


@pytest.mark.parametrize(
    "what, mode, ranks, told",
    [
        ("tensors", "auto", 1, "checkpoint of step 20 could not be written"),
        pytest.param(
            "tensors", "shard", 2, "checkpoint of step 20 could not be written", marks=pytest.mark.full
        ),
        pytest.param(
            "state.json", "shard", 2, "checkpoint of step 20 could not be written", marks=pytest.mark.full
        ),
        ("metrics", "auto", 1, "metrics.jsonl: cannot be written"),
    ],
)
def test_a_file_that_may_not_grow_stops_the_run_and_harms_nothing(
    what: str, mode: str, ranks: int, told: str, data: Path, tmp_path: Path
) -> None:
    """It behaves like a full disk, without a separate file system. With shards, every process reports the same."""
    # Written in the background, the checkpoint of step 10 may end, and with it the limit begin, just before step 20.
    checkpoint = {"background": False} if what == "metrics" else {}
    config = tiny_run.config(
        data, schedule={"length": "30 steps"}, parallel={"mode": mode}, checkpoint=checkpoint
    )
    log, run = tmp_path / "log", tmp_path / "run"
    child = tiny_run.call(limited, tmp_path, config, what, log=log, ranks=ranks)
    child.wait()
    assert [p.exitcode for p in child.processes] == [1] * ranks, child.text()
    # it may be the last step on a busy machine
    beside = r"warning: |trains |step 1/30 |\d+ tokens per step|training waits: "
    lines = [line for line in child.text().splitlines() if not re.match(beside, line)]
    assert len({re.sub(r"\d+ MiB", "", line) for line in lines}) == 1 and len(lines) == ranks, child.text()
    assert told in lines[0] and str(run) in lines[0]
    if what != "metrics":
        assert "File too large" in lines[0] and "MiB free" in lines[0]
    assert tiny_run.checkpoints(run) == ["step-000000000", "step-000000010"]
    for checkpoint in find(run / "checkpoints"):
        files.verify(checkpoint)
    again = resumed(run, log, ranks)
    assert again.wait() == 0, again.text()
    straight = first(tmp_path, "straight", config, tmp_path / "straight.log", ranks)
    assert straight.wait() == 0 and curve(run) == curve(tmp_path / "straight")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    result = None
    if shutil.which("mount"):
        result = subprocess.run(mount, capture_output=True, text=True)
    if result is None or result.returncode:
        pytest.skip(
            f"a file system cannot be mounted here: {result.stderr.strip() if result else 'no mount'}"
        )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, leave: int) -> Path:
    filler = disk / "filler"
    free = shutil.disk_usage(disk).free - leave
    filler.write_bytes(bytes(free))
    return filler


@pytest.mark.full
@pytest.mark.parametrize(
    "leave, every, what",
    [(200_000, 10, "checkpoint of step 20"), (0, 60, "metrics.jsonl")],
)
def test_a_full_disk_stops_the_run_and_harms_nothing(
    leave: int, every: int, what: str, data: Path, small_disk: Path, tmp_path: Path
) -> None:
    """With 200 kB left, the next checkpoint does not fit; with nothing left, the metrics do not."""
    length = {"length": f"{2 * every} steps"}
    config = tiny_run.config(
        data, schedule=length, batch={"tokens": 1024}, checkpoint={"every": f"{every} steps"}
    )
    straight = tiny_run.train(tmp_path, config, "straight").run.path
    log, run = tmp_path / "log", small_disk / "run"
    child = tiny_run.call(command_like, small_disk, config, log=log)
    wait_for(lambda: len(rows(run)) >= every + 3, child)
    filler = fill(small_disk, leave)
    assert child.wait() == 1, child.text()
    # it may be the last step on a busy machine
    beside = ("warning: ", "trains ", "step ", "training waits: ")
    lines = [line for line in child.text().splitlines() if not line.startswith(beside)]
    assert len(lines) == 1 and str(run) in lines[0], lines
    assert what in lines[0] and ("No space left" in lines[0] or "disk is full" in lines[0])
    assert not list((run / "checkpoints").glob(".tmp-*"))
    good = find(run / "checkpoints")
    assert good and good[0].step == every
    for checkpoint in good:
        files.verify(checkpoint)

    # The disk is still full: the run makes no progress, and reports it again.
    again = tiny_run.command([*RESUME, str(run)], log)
    assert again.wait() == 1 and "Traceback" not in again.text() and "this is a bug" not in again.text()
    filler.unlink()
    again = tiny_run.command([*RESUME, str(run)], log)
    assert again.wait() == 0, again.text()
    assert curve(run) == curve(straight)


def test_a_disk_that_is_full_before_the_first_step(data: Path, small_disk: Path) -> None:
    """The tokenizer is the run's first large file. Nothing of the run is left, and the message names the copy."""
    size = (data / "tokenizer.json").stat().st_size
    fill(small_disk, size // 2 + 3 * 4096)  # files before it take a block each
    with pytest.raises(RunError, match=r"disk/run/tokenizer\.json: cannot be written: No space left"):
        tiny_run.train(small_disk, tiny_run.config(data))
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


def command_like(root: Path, config: object) -> None:
    """Run with the command line's error handling."""
    from deskside.cli import main as cli

    def train(argv: object) -> int:
        tiny_run.train(root, config)  # type: ignore[arg-type]
        return 0

    cli._command = lambda name: train  # type: ignore[assignment]
    sys.exit(cli.main(["train"]))
