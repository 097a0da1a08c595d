"""Child processes: every failure is reported as an Outcome, and no process of a child outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deskside.utils import child_process

MODULE = "tests.utils.test_child_process:"


def alive(pid: int) -> bool:
    """Return True if a process is running and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    """Return True if a process ends within this time."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


# Functions that run in child processes


def double(number: int) -> dict[str, object]:
    print("output of a library")
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
    """Start another process, as a compiler does, write both process ids to the file `pids`, and never end."""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(f"{os.getpid()} {helper.pid}")
    time.sleep(600)


def test_result_of_a_child_is_returned() -> None:
    outcome = child_process.run(MODULE + "double", {"number": 21}, 60)
    assert (outcome.status, outcome.error, outcome.value["twice"]) == ("ok", "", 42)
    assert outcome.value["pid"] != os.getpid()
    assert outcome.value["session"] == outcome.value["pid"]
    assert "output of a library" in outcome.output
    assert 0 < outcome.seconds < 60


def test_environment_variables_are_added() -> None:
    assert child_process.run(MODULE + "variable", {"name": "ADDED"}, 60, {"ADDED": "yes"}).value == "yes"


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
def test_failures_are_reported_by_status(target: str, status: str, error: str) -> None:
    outcome = child_process.run(MODULE + target, {}, 60)
    assert (outcome.status, outcome.error, outcome.value) == (status, error, None)
    assert outcome.died == (target in ("abort", "leave"))


def test_import_error_is_reported_as_failure() -> None:
    outcome = child_process.run("deskside.probe.nothing:at_all", {}, 60)
    assert outcome.status == "failed" and "deskside.probe.nothing" in outcome.error


def test_timeout_kills_all_processes_of_the_child(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    outcome = child_process.run(MODULE + "hang", {"pids": str(pids)}, 5)
    assert (outcome.status, outcome.error) == ("timeout", "no answer within 5 s")
    assert outcome.seconds < 15
    assert all(gone_within(int(pid), 10) for pid in pids.read_text().split())


def test_interrupting_the_parent_kills_the_child(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    call = f"child_process.run({MODULE + 'hang'!r}, {{'pids': {str(pids)!r}}}, 500)"
    code = f"from deskside.utils import child_process; {call}"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    start = time.monotonic()
    while not (pids.exists() and pids.read_text()) and time.monotonic() - start < 60:
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(20) != 0
    assert all(gone_within(int(pid), 10) for pid in pids.read_text().split())
