"""`--gpus` gives the same run as torchrun, one message, one exit code, and no process outlives the others.

Most tests start a small program in place of `deskside`, which does what a test needs on each rank.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from deskside.train import launch
from deskside.utils.errors import ProcessError, UsageError
from tests.sources import ROOT
from tests.train import tiny_run
from tests.train.test_resume import SLOWER, arguments, check_same, preset
from tests.train.tiny_run import kill_at_step, rows

PYTHON = sys.executable
PROGRAM = """#!{python}
import os, signal, sys, time
sys.path.insert(0, {root!r})
from deskside.utils import launched
rank, folder = int(os.environ["RANK"]), {folder!r}
launched.begin()
def fail(text, kind, code):
    launched.report("deskside: " + text, kind)
    sys.exit(code)
def hang():
    open(os.path.join(folder, str(rank)), "w").write(str(os.getpid()))
    while True:  # a signal just before one long sleep would be handled after it
        time.sleep(0.1)
def others_started(count):
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
{body}
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that makes a program from a body. `launch` starts it instead of
    deskside. Yields the folder of its pids.
    """

    def make(body: str) -> Path:
        folder, file = tmp_path / "pids", tmp_path / "program.py"
        folder.mkdir()
        file.write_text(PROGRAM.format(python=PYTHON, root=str(ROOT), folder=str(folder), body=body))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(file))
        monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
        return folder

    return make


def is_running(pid: int) -> bool:
    """Return True if a process is running and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_all_ended(pids: Sequence[int], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a process outlived the launcher"
        time.sleep(0.01)


FAILURES = {
    "all, wrong usage": ("fail('no such preset', 'error', 2)", 2, "deskside: no such preset"),
    "one, wrong usage": (
        "fail('lost', 'unexpected', 1) if rank else (time.sleep(0.3), fail('no such backend', 'error', 2))",
        2,
        "deskside: no such backend",
    ),
    "all, the same": ("fail('disk full', 'error', 1)", 1, "deskside: disk full"),
    "the cause ends later": (
        "fail('lost', 'unexpected', 1) if rank else (time.sleep(0.3), fail('disk full', 'error', 1))",
        1,
        "deskside: rank 0: disk full",
    ),
    "the others hang and ignore SIGTERM": (
        "if rank == 2: others_started(2); fail('out of memory: 3 GiB', 'error', 1)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); hang()",
        1,
        "deskside: rank 2: out of memory: 3 GiB",
    ),
    "killed": (
        "if rank == 1: others_started(2); os.kill(os.getpid(), signal.SIGKILL)\nhang()",
        137,
        "deskside: rank 1: was killed by SIGKILL",
    ),
    "killed, the others lose it": (
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.2); fail('lost', 'unexpected', 1)",
        137,
        "deskside: rank 1: was killed by SIGKILL",
    ),
    "without a report": (
        "if rank == 1: print('bad address', file=sys.stderr); sys.exit(7)\nhang()",
        7,
        "bad address\ndeskside: rank 1: ended with 7",
    ),
}


# These tell the same failures apart as the others do, at other moments.
SPECIAL = ("one, wrong usage", "all, the same", "killed, the others lose it", "without a report")


@pytest.mark.parametrize(
    "failure", [pytest.param(name, marks=pytest.mark.full if name in SPECIAL else ()) for name in FAILURES]
)
def test_a_failure_ends_all_and_says_why_once(
    failure: str, program: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    body, code, text = FAILURES[failure]
    folder = program(body)
    handlers = [signal.getsignal(number) for number in (*launch.FORWARDED, signal.SIGQUIT)]
    began = time.monotonic()
    with pytest.raises((UsageError, ProcessError)) as raised:
        launch.launch([], 3)
    error = raised.value
    assert isinstance(error, UsageError if code == 2 else ProcessError) and error.exit_code == code
    assert time.monotonic() - began < launch.SETTLE_SECONDS + launch.GRACE_SECONDS + 10
    assert [signal.getsignal(number) for number in (*launch.FORWARDED, signal.SIGQUIT)] == handlers
    printed, _, message = text.rpartition("deskside: ")
    assert str(error) == message and capfd.readouterr() == ("", printed)
    check_all_ended([int(path.read_text()) for path in folder.iterdir()], 0.1)


def in_a_process(log: Path, before: str = "") -> "subprocess.Popen[bytes]":
    """Launch two programs from a separate process that can be killed. before: code that it runs first."""
    patience = "launch.STOP_SECONDS = launch.SETTLE_SECONDS = launch.GRACE_SECONDS = 1"
    code = (
        f"import sys; sys.executable = {sys.executable!r}\n"
        f"from deskside.train import launch; {patience}\n"
        "from deskside.utils import signals\n"
        f"{before}\n"
        "try:\n"
        "    sys.exit(launch.launch([], 2))\n"
        "except KeyboardInterrupt as error:  # as `cli.main` does\n"
        "    print(signals.message(error), file=sys.stderr)\n"
        "    sys.exit(128 + signals.signal_number(error))\n"
    )
    with log.open("wb") as file:
        return subprocess.Popen([PYTHON, "-c", code], cwd=ROOT, stderr=file)


def test_only_rank_0_prints(program: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    program("print('out', rank, flush=True); print('err', rank, sys.argv[1:], file=sys.stderr)")
    assert launch.launch(["train", "a b"], 3) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0 ['-m', 'deskside', 'train', 'a b']\n")


def test_each_launch_has_its_own_rendezvous(program: Callable[[str], Path], tmp_path: Path) -> None:
    """Two launches run at the same time."""
    folder = program(
        "import json; names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_PORT')\n"
        "json.dump([os.environ[name] for name in names], open(os.path.join(folder, str(os.getpid())), 'w'))\n"
        "others_started(4)"
    )
    launches = [in_a_process(tmp_path / name) for name in ("one", "two")]
    assert [process.wait(60) for process in launches] == [0, 0]
    seen = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert sorted(row[:4] for row in seen) == [["0", "0", "2", "2"]] * 2 + [["1", "1", "2", "2"]] * 2
    assert len({row[4] for row in seen}) == 2


def started(folder: Path) -> list[int]:
    """Return the process ids of two programs that hang, once both do."""
    deadline = time.monotonic() + 60
    while len(texts := [path.read_text() for path in folder.iterdir()]) < 2 or not all(texts):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(text) for text in texts]


def test_the_others_end_with_the_launcher(program: Callable[[str], Path], tmp_path: Path) -> None:
    folder = program("signal.signal(signal.SIGTERM, signal.SIG_IGN); hang()")
    process = in_a_process(tmp_path / "log")
    pids = started(folder)
    process.kill()
    process.wait()
    check_all_ended(pids)


INTERRUPTED = """
seen = []
def interrupted(*_):
    seen.append(1)
    if rank == 0 and len(seen) == {ends_at}:
        sys.exit(130)
signal.signal(signal.SIGINT, interrupted)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hang()
"""


@pytest.mark.full
@pytest.mark.parametrize("ends_at", [2, 4])
def test_a_second_ctrl_c_does_not_wait(ends_at: int, program: Callable[[str], Path], tmp_path: Path) -> None:
    """The first Ctrl-C asks for a checkpoint. After the second, rank 0 may end while
    rank 1 hangs, or both hang until the third.
    """
    folder = program(INTERRUPTED.format(ends_at=ends_at))
    process = in_a_process(tmp_path / "log")
    pids = started(folder)
    for _ in range(min(ends_at, 3) - 1):
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(launch.SETTLE_SECONDS + 0.5)
        assert all(map(is_running, pids))
    process.send_signal(signal.SIGINT)
    assert process.wait(launch.SETTLE_SECONDS + launch.GRACE_SECONDS + 10) == 130
    assert (tmp_path / "log").read_text() == ("interrupted\n" if ends_at == 4 else "")
    check_all_ended(pids, 0.1)


EARLY = """
import os, time
begin = launch._Forwarder.begin
def early(*arguments):
    os.kill(os.getpid(), {number})
    time.sleep(0.1)
    begin(*arguments)
launch._Forwarder.begin = early
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_between_the_start_and_the_wait_ends_all(
    number: signal.Signals, program: Callable[[str], Path], tmp_path: Path
) -> None:
    """Torch's own handler raises in this moment, and the processes end with the launcher."""
    folder = program("hang()")
    process = in_a_process(tmp_path / "log", EARLY.format(number=int(number)))
    assert process.wait(30) == 128 + number
    assert (tmp_path / "log").read_text().startswith("interrupted")
    check_all_ended([int(path.read_text()) for path in folder.iterdir()], 0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_who_waits_for_an_interrupted_process_is_ended(
    number: signal.Signals, program: Callable[[str], Path], tmp_path: Path
) -> None:
    """During start-up, a signal ends rank 1 at once, and rank 0 waits for it on the GPU."""
    handler = f"(lambda *_: sys.exit(128 + {int(number)})) if rank else signal.SIG_IGN"
    folder = program(f"signal.signal({int(number)}, {handler}); hang()")
    process = in_a_process(tmp_path / "log")
    pids = started(folder)
    process.send_signal(number)
    assert process.wait(launch.GRACE_SECONDS + 20) == 128 + number
    assert (tmp_path / "log").read_text().startswith("interrupted")
    check_all_ended(pids, 0.1)


@pytest.mark.parametrize(
    ("gpus", "device", "visible", "torchrun", "expected"),
    [
        (None, "auto", 4, None, 1),
        ("1", "cuda", 0, None, 1),
        ("auto", "auto", 4, None, 4),
        ("auto", "auto", 0, None, 1),
        ("3", "cuda", 4, None, 3),
        ("3", "cpu", 0, None, 3),
        ("auto", "auto", 8, "2", 2),
        ("2", "auto", 8, "2", 2),
        (None, "auto", 8, "2", 2),
        ("3", "auto", 2, None, "more than the 2"),
        ("3", "auto", 8, "2", "torchrun"),
        ("auto", "cpu", 0, None, "give a number"),
        ("0", "cpu", 0, None, "--gpus"),
        ("-1", "cpu", 0, None, "--gpus"),
        ("two", "cpu", 0, None, "--gpus"),
        ("2.0", "cpu", 0, None, "--gpus"),
    ],
)
def test_process_count(
    gpus: str | None,
    device: str,
    visible: int,
    torchrun: str | None,
    expected: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if torchrun is not None:
        monkeypatch.setenv("WORLD_SIZE", torchrun)
    if isinstance(expected, int):
        assert launch.process_count(gpus, device) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            launch.process_count(gpus, device)


# Real runs: two processes on the CPU


LAUNCHERS: list["subprocess.Popen[bytes]"] = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Leave no processes after a failed test either: they end with their launcher."""
    yield
    while LAUNCHERS:
        LAUNCHERS.pop().kill()


def start(argv: list[str], log: Path) -> "subprocess.Popen[bytes]":
    LAUNCHERS.append(tiny_run.program([*argv, "--gpus", "2"], log))
    return LAUNCHERS[-1]


def run_of(folder: Path, data: Path, name: str) -> tuple["subprocess.Popen[bytes]", Path]:
    changes = {"batch": SLOWER, "checkpoint": {"every": "10 steps"}}
    process = start(arguments(folder, name, preset(folder, data, **changes)), folder / f"{name}.log")
    return process, folder / name


@pytest.mark.full
def test_the_same_run_as_under_torchrun_whoever_is_killed(data: Path, tmp_path: Path) -> None:
    """Rank 1 is killed, and later the launcher. Resumed twice, the run is bitwise equal to torchrun's."""
    first, run = run_of(tmp_path, data, "killed")
    kill_at_step(
        run,
        25,
        lambda: os.kill(tiny_run.descendants(first.pid)[2], signal.SIGKILL),
        lambda: first.poll() is None,
    )
    assert first.wait(launch.SETTLE_SECONDS + launch.GRACE_SECONDS + 10) == 128 + signal.SIGKILL
    log = tmp_path / "killed.log"
    assert "rank 1: was killed by SIGKILL" in log.read_text() and "Traceback" not in log.read_text()

    again = start(["train", "--resume", str(run)], log)
    pids: list[int] = []

    def kill_the_launcher() -> None:
        pids.extend(tiny_run.descendants(again.pid))
        again.kill()

    kill_at_step(run, 40, kill_the_launcher, lambda: again.poll() is None)
    again.wait(10)
    assert len(pids) >= 3
    check_all_ended(pids)
    assert start(["train", "--resume", str(run)], log).wait(120) == 0, log.read_text()

    other = arguments(tmp_path, "torchrun", str(tmp_path / "tiny.toml"))
    assert tiny_run.program(other, log, 2).wait(120) == 0, log.read_text()
    check_same(run, tmp_path / "torchrun")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_saves_and_ends_all(number: signal.Signals, data: Path, tmp_path: Path) -> None:
    first, run = run_of(tmp_path, data, "stopped")
    pids: list[int] = []

    def stop() -> None:
        pids.extend(tiny_run.descendants(first.pid))
        first.send_signal(number)

    seen = kill_at_step(run, 15, stop, lambda: first.poll() is None)
    assert first.wait(60) == 128 + number
    check_all_ended(pids, 0.1)
    at = rows(run)[-1]["step"]
    assert seen <= at <= seen + 4 and tiny_run.checkpoints(run)[-1] == f"step-{at:09d}"
    text = (tmp_path / "stopped.log").read_text()
    assert text.count(f"{number.name}: saved at step {at}") == 1 and "interrupted" not in text
    assert f"deskside train --resume {run} --gpus 2\n" in text
    alone = tiny_run.program(["train", "--resume", str(run)], tmp_path / "alone.log")
    assert alone.wait(120) == 0, (tmp_path / "alone.log").read_text()
    assert [row["step"] for row in rows(run)] == list(range(1, 61))
