"""The fork server: a trusted process that has imported everything, so that starting a check only takes forks.

    caller -> server -> supervisor -> solution   runs the model's code; has neither the tests nor the expected values
                                   -> judge      runs the tests

The kernel kills each process of this chain when its parent ends, so no process is left behind, however the caller ends.
The solution is forked before any process has read the tests. Only the judge has the file descriptor for the verdict.
Each child has a descriptor on which it reports that it is locked, and closes it before it reads what the model wrote.
Exit codes are ignored.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from deskside.evaluate.sandboxed.channel import ENDED, REASON_CHARACTERS, Channel
from deskside.evaluate.sandboxed.judge import Judge
from deskside.evaluate.sandboxed.lock import LockError, lock, preload
from deskside.evaluate.sandboxed.solution import Solution
from deskside.utils.signals import die_with

START_SECONDS = 60.0  # maximum time to fork and lock two processes on a busy machine
# Beyond the wall-clock limit, until a child's own alarm kills it if the supervisor is late.
GRACE_SECONDS = 2.0
LOCKED = b"locked"


def main() -> None:
    """Run the server. Arguments: the descriptor of the control socket, and the process id of the caller."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    os.environ.clear()
    sys.set_int_max_str_digits(0)  # solutions may print large integers
    ctypes.CDLL(None)  # loads what `die_with` and `lock` need
    preload()
    gc.freeze()  # keeps the garbage collector from copying shared pages in the children
    # The kernel reaps the supervisors. They report on their sockets, so their exit codes are not needed.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.settimeout(1.0)
    while os.getppid() == parent:
        try:
            request, descriptors, _, _ = socket.recv_fds(control, 4096, 3)
        except TimeoutError:
            continue
        if not descriptors:
            return
        _fork(lambda: _supervise(json.loads(request), descriptors), control.fileno())  # noqa: B023 - runs at once
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(work: Callable[[], object], *to_close: int) -> int:
    """Run `work` in a child process, which dies with this one. Return its process id.

    to_close: file descriptors to close in the child.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        for descriptor in to_close:
            os.close(descriptor)
        die_with(parent)
        work()
    finally:
        os._exit(0)


def _supervise(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run one check and write the outcome to the caller's socket."""
    caller, code, tests = descriptors
    try:
        outcome = Supervisor(request, caller, code, tests).run()
    except (OSError, LockError) as error:
        outcome = {"refused": f"{type(error).__name__}: {error}"}
    os.write(caller, json.dumps(outcome).encode())


class Supervisor:
    """Runs one check: starts the two locked processes, and waits for the judge's verdict until a deadline."""

    def __init__(self, request: dict[str, Any], caller: int, code: int, tests: int):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._request = request
        self._caller = caller
        self._seconds = float(request["seconds"])
        self._wall_seconds = float(request["wall_seconds"])
        solution_end, judge_end = socket.socketpair()
        solution_status, solution_status_writer = os.pipe()
        judge_status, judge_status_writer = os.pipe()
        self._verdict, verdict_writer = os.pipe()
        self._statuses = [solution_status, judge_status]
        for_supervisor = (caller, solution_status, judge_status, self._verdict)
        # The solution is forked first: its memory must not contain the tests.
        self._solution = _fork(
            lambda: self._run_solution(solution_end.fileno(), solution_status_writer, code),
            *(*for_supervisor, tests, judge_end.fileno(), judge_status_writer, verdict_writer),
        )
        self._judge = _fork(
            lambda: self._run_judge(judge_end.fileno(), judge_status_writer, tests, verdict_writer),
            *(*for_supervisor, code, solution_end.fileno(), solution_status_writer),
        )
        for descriptor in (code, tests, solution_status_writer, judge_status_writer, verdict_writer):
            os.close(descriptor)
        solution_end.close()
        judge_end.close()

    def run(self) -> dict[str, Any]:
        """Return {"passed", "reason"}, or {"refused"} if this system could not lock the processes."""
        try:
            deadline = time.monotonic() + START_SECONDS
            for status in self._statuses:
                reported = self._read(status, deadline)
                if reported != LOCKED:
                    return {"refused": (reported or b"a process did not start").decode(errors="replace")}
            verdict = self._read(self._verdict, time.monotonic() + self._wall_seconds)
            if verdict is None:
                return {"passed": False, "reason": f"took longer than {self._wall_seconds:g} s by the clock"}
            return self._outcome(verdict)
        finally:
            for child in (self._solution, self._judge):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def _outcome(self, verdict: bytes) -> dict[str, Any]:
        """Return the outcome for what the judge wrote, with a better reason if a limit ended a process."""
        if not verdict:  # a limit ended the judge
            reason = self._limit_exceeded(self._judge, True) or "the tests used too much memory"
            return {"passed": False, "reason": reason}
        passed, reason = json.loads(verdict)
        if not passed:
            reason = self._limit_exceeded(self._solution, reason == ENDED) or reason
        return {"passed": passed, "reason": reason}

    def _limit_exceeded(self, child: int, wait: bool) -> str | None:
        """Return a reason if the kernel killed this process for exceeding a limit, else None.

        wait: Wait up to half a second, because a process closes its files before it counts as ended.
        """
        deadline = time.monotonic() + (0.5 if wait else 0)
        while True:
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        if ended is None or ended.si_code != os.CLD_KILLED:
            return None
        if ended.si_status not in (signal.SIGKILL, signal.SIGXCPU):
            return None
        return f"took longer than {self._seconds:g} s of processor time, or too much memory"

    def _read(self, descriptor: int, deadline: float) -> bytes | None:
        """Return everything up to the end of the stream; None at the deadline. Exits if the caller has ended."""
        data = b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._caller, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            for ready, _ in poll.poll(left * 1000):
                if ready == self._caller:
                    os._exit(0)
                part = os.read(descriptor, 4096)
                if not part:
                    return data
                data += part
        return None

    def _lock(self, status: int) -> None:
        """Lock this process, and report LOCKED or the error to the supervisor."""
        try:
            lock(self._seconds, self._wall_seconds + GRACE_SECONDS, int(self._request["memory_bytes"]))
        except (LockError, OSError, ValueError) as error:
            os.write(status, f"{error}".encode())
            os._exit(0)
        os.write(status, LOCKED)
        os.close(status)

    def _run_solution(self, channel: int, status: int, code: int) -> None:
        self._lock(status)
        source = _text(code)
        Solution(Channel(channel)).serve(source)

    def _run_judge(self, channel: int, status: int, tests: int, verdict: int) -> None:
        self._lock(status)

        def end(passed: bool, reason: str) -> NoReturn:
            os.write(verdict, json.dumps([passed, reason[:REASON_CHARACTERS]]).encode())
            os._exit(0)

        source = json.loads(_text(tests))
        Judge(Channel(channel), end).run(source["tests"], source["helpers"], source["entry_point"])


def _text(descriptor: int) -> str:
    """Read a file as text, and close it."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    main()
