"""The fork server: one trusted process that has imported everything, from which each check forks its processes.

    caller -> server -> supervisor -> solution   runs the model's code, knows nothing
                                   -> judge      runs the tests

A process in this chain is killed by the kernel when the one before it ends, so nothing is left behind however the
caller ends. The solution is forked before anybody has read the tests. Only the judge holds the descriptor of the
verdict; each child reports on its own descriptor that the lock holds, and closes it before it reads what a model
wrote. Exit codes mean nothing.
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
from deskside.evaluate.sandboxed.lock import LockError, die_with, lock, preload
from deskside.evaluate.sandboxed.solution import Solution

START_SECONDS = 60.0  # to fork and lock two processes, on a machine that is busy
GRACE_SECONDS = 2.0  # after which a child's own alarm ends it, should its supervisor be late
LOCKED = b"locked"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    os.environ.clear()
    sys.set_int_max_str_digits(0)
    ctypes.CDLL(None)
    preload()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report on their socket; the kernel reaps them
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


def _fork(work: Callable[[], object], *closed: int) -> int:
    """Run `work` in a new process, which dies with this one. Returns its process id."""
    me = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        for descriptor in closed:
            os.close(descriptor)
        die_with(me)
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
    """One check: two locked processes, a deadline, and the verdict of one of them."""

    def __init__(self, request: dict[str, Any], caller: int, code: int, tests: int):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._request = request
        self._caller = caller
        self._seconds = float(request["seconds"])
        self._wall_seconds = float(request["wall_seconds"])
        solution_end, judge_end = socket.socketpair()
        solution_locked, solution_says = os.pipe()
        judge_locked, judge_says = os.pipe()
        self._verdict, verdict = os.pipe()
        self._statuses = [solution_locked, judge_locked]
        # The solution first: its memory must not hold the tests.
        self._solution = _fork(
            lambda: self._solve(solution_end.fileno(), solution_says, code),
            *(caller, tests, judge_end.fileno(), judge_says, *self._statuses, self._verdict, verdict),
        )
        self._judge = _fork(
            lambda: self._judged(judge_end.fileno(), judge_says, tests, verdict),
            *(caller, code, solution_end.fileno(), solution_says, *self._statuses, self._verdict),
        )
        for descriptor in (code, tests, solution_says, judge_says, verdict):
            os.close(descriptor)
        solution_end.close()
        judge_end.close()

    def run(self) -> dict[str, Any]:
        """Return {"passed", "reason"}, or {"refused"} if this system could not lock the processes."""
        try:
            deadline = time.monotonic() + START_SECONDS
            for status in self._statuses:
                said = self._read(status, deadline)
                if said != LOCKED:
                    return {"refused": (said or b"a process did not start").decode(errors="replace")}
            verdict = self._read(self._verdict, time.monotonic() + self._wall_seconds)
            if verdict is None:
                return {"passed": False, "reason": f"took longer than {self._wall_seconds:g} s by the clock"}
            return self._judged_by(verdict)
        finally:
            for child in (self._solution, self._judge):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def _judged_by(self, verdict: bytes) -> dict[str, Any]:
        if not verdict:  # a limit ended the judge
            return {
                "passed": False,
                "reason": self._used_up(self._judge, True) or "the tests used too much memory",
            }
        passed, reason = json.loads(verdict)
        if not passed:
            reason = self._used_up(self._solution, reason == ENDED) or reason
        return {"passed": passed, "reason": reason}

    def _used_up(self, child: int, wait: bool) -> str | None:
        """Return a reason if the kernel ended this process for its processor time. Words only: it decides nothing.

        wait: A moment, because a process closes its files before it counts as ended.
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
        """Return everything up to the end of the stream; None at the deadline. Exits when the caller has gone."""
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

    def _lock(self, says: int) -> None:
        try:
            lock(self._seconds, self._wall_seconds + GRACE_SECONDS, int(self._request["memory_bytes"]))
        except (LockError, OSError, ValueError) as error:
            os.write(says, f"{error}".encode())
            os._exit(0)
        os.write(says, LOCKED)
        os.close(says)

    def _solve(self, channel: int, says: int, code: int) -> None:
        self._lock(says)
        source = _text(code)
        Solution(Channel(channel)).serve(source)

    def _judged(self, channel: int, says: int, tests: int, verdict: int) -> None:
        self._lock(says)

        def end(passed: bool, reason: str) -> NoReturn:
            os.write(verdict, json.dumps([passed, reason[:REASON_CHARACTERS]]).encode())
            os._exit(0)

        source = json.loads(_text(tests))
        Judge(Channel(channel), end).run(source["tests"], source["helpers"], source["entry_point"])


def _text(descriptor: int) -> str:
    """Return the content of a file, and close it."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    main()
