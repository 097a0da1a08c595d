"""A child process: whatever becomes of it is a result, and nothing that it started outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deskside.utils import child_process

HERE = "tests.utils.test_child_process:"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


# What the children run.
def double(number: int) -> dict[str, object]:
    print("a library prints what it likes")
    return {"twice": 2 * number, "pid": os.getpid(), "session": os.getsid(0)}


def variable(name: str) -> str:
    return os.environ[name]


def no_memory() -> None:
    raise MemoryError


def cuda_no_memory() -> None:
    raise RuntimeError("CUDA error: out of memory\nand more lines")


def wrong() -> None:
    raise ValueError("first line\nsecond line")


def abort() -> None:
    os.abort()


def leave() -> None:
    os._exit(3)


def hang(pids: str) -> None:
    """Starts a process of its own, as a compiler does, and never ends."""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(f"{os.getpid()} {helper.pid}")
    time.sleep(600)


def test_a_result_comes_back() -> None:
    outcome = child_process.run(HERE + "double", {"number": 21}, 60)
    assert (outcome.status, outcome.error, outcome.value["twice"]) == ("ok", "", 42)
    assert outcome.value["pid"] != os.getpid()
    assert outcome.value["session"] == outcome.value["pid"]
    assert "prints what it likes" in outcome.stderr
    assert 0 < outcome.seconds < 60


def test_environment_is_added() -> None:
    assert child_process.run(HERE + "variable", {"name": "ADDED"}, 60, {"ADDED": "yes"}).value == "yes"


@pytest.mark.parametrize(
    ("target", "status", "error"),
    [
        ("no_memory", "oom", "MemoryError: MemoryError"),
        ("cuda_no_memory", "oom", "RuntimeError: CUDA error: out of memory"),
        ("wrong", "failed", "ValueError: first line"),
        ("abort", "failed", "the process was ended by SIGABRT"),
        ("leave", "failed", "the process ended with exit code 3 and no answer"),
    ],
)
def test_failures_are_results(target: str, status: str, error: str) -> None:
    outcome = child_process.run(HERE + target, {}, 60)
    assert (outcome.status, outcome.error, outcome.value) == (status, error, None)


def test_a_module_that_cannot_be_imported_is_a_result() -> None:
    outcome = child_process.run("deskside.probe.nothing:at_all", {}, 60)
    assert outcome.status == "failed" and "deskside.probe.nothing" in outcome.error


def test_the_time_limit_ends_everything_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    outcome = child_process.run(HERE + "hang", {"pids": str(pids)}, 5)
    assert (outcome.status, outcome.error) == ("timeout", "no answer within 5 s")
    assert outcome.seconds < 15
    assert all(gone_within(int(pid), 10) for pid in pids.read_text().split())


def test_an_interrupt_ends_the_child(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    call = f"child_process.run({HERE + 'hang'!r}, {{'pids': {str(pids)!r}}}, 500)"
    code = f"from deskside.utils import child_process; {call}"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while not (pids.exists() and pids.read_text()) and time.monotonic() - began < 60:
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(20) != 0
    assert all(gone_within(int(pid), 10) for pid in pids.read_text().split())
