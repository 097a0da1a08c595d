"""Sandbox for generated code: it can neither do harm nor fake a pass of the tests.

The Linux kernel (seccomp and resource limits, without root) guarantees for everything that the code does:

    files       none can be opened, created, changed or listed
    network     no socket can be created
    processes   no process or thread can be started, and no signal sent to another process
    resources   address space, processor time and wall-clock time are limited
    inheritance no environment variables, and no open files except its source, a socket to the judge and /dev/null
    output      is discarded
    leftovers   none: the kernel kills all processes of the sandbox when the caller ends, even if it is killed

The tests run in another process, the judge, which never executes the model's code. It receives only plain values. So
nothing that the code does inside its own process can affect the verdict: neither changing `assert`, `==`, built-in
functions, modules, frames or memory, nor exiting early with any exit code, nor writing to any file descriptor. The
process of the code never receives the tests or the expected values.

Instances of the code's own classes stay in its process, and the tests hold references to them. The code answers the
tests' operations on such an object (attributes, methods, length, iteration), but a plain value never equals it, and the
code never learns what it is compared with. Not guaranteed:

    - tests that let the code decide: `assert f(x) == Point(1, 2)` with a class Point of the code, or a helper that the
      tests call and only the code defines. Pass `entry_point` and `helpers` if they are known.
    - protection against bugs of the kernel or of Python, and against side channels of the processor
    - that the tests are correct. Tests that use nothing of the code never pass.

Not supported in the sandbox: modules other than common ones of the standard library (`sandboxed.lock.PRELOADED`),
temporary files, threads. Instances of the tests' own classes cannot be passed to the code; instances of subclasses of
int, str, list and other plain types are converted to the plain type.

On systems other than Linux on x86-64 or ARM64, code is not run at all (RunError).
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import deskside
from deskside.evaluate.sandboxed.fork_server import START_SECONDS
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError

SECONDS = 10.0
# Wall-clock limit over processor time: a process may get a third of a core on a busy machine.
WALL_FACTOR = 3.0
MEMORY_MIB = 512
SERVER = ("-m", "deskside.evaluate.sandboxed.fork_server")


@dataclass(frozen=True)
class SandboxResult:
    """The verdict of the tests. reason: why they failed, such as an exception or an exceeded limit; empty if passed."""

    passed: bool
    reason: str


def check(
    code: str,
    tests: str,
    entry_point: str = "",
    helpers: str = "",
    *,
    seconds: float = SECONDS,
    memory_mib: int = MEMORY_MIB,
) -> SandboxResult:
    """Run `code` and then `tests`, which use its functions and raise an exception if it is wrong.

    Args:
        entry_point: Name of the function under test, if known. The code must define it.
        helpers: Trusted source that the tests may use, such as the prompt of the task. The code cannot replace its
            definitions, except `entry_point`.
        seconds: Maximum processor time of each of the two processes. The wall-clock limit is WALL_FACTOR times that.
        memory_mib: Maximum address space of each of the two processes; Python itself takes about 40 MiB.

    Raises RunError if this machine cannot sandbox the processes, or if the server ends twice without a verdict.
    """
    wall_seconds = WALL_FACTOR * seconds
    request = {"seconds": seconds, "wall_seconds": wall_seconds, "memory_bytes": memory_mib << 20}
    for_judge = json.dumps({"tests": tests, "helpers": helpers, "entry_point": entry_point})
    code_file, tests_file = _memory_file(code), _memory_file(for_judge)
    try:
        outcome = None
        for _ in range(2):  # retry if the fork server was killed, for example because memory ran out
            outcome = _server.request(json.dumps(request).encode(), (code_file, tests_file), wall_seconds)
            if outcome is not None:
                break
    finally:
        os.close(code_file)
        os.close(tests_file)
    if outcome is None:
        raise RunError(
            "sandbox: its server ended twice without a verdict; check the kernel's log for out-of-memory kills"
        )
    if "refused" in outcome:
        raise RunError(
            f"sandbox: this system cannot restrict processes ({outcome['refused']}; it needs Linux with seccomp on "
            "x86-64 or ARM64), so no code of a model is run here; use a reward or a task without code"
        )
    return SandboxResult(bool(outcome["passed"]), str(outcome["reason"]))


def check_many(
    jobs: Sequence[tuple[str, ...]],
    *,
    seconds: float = SECONDS,
    memory_mib: int = MEMORY_MIB,
    workers: int | None = None,
) -> list[SandboxResult]:
    """Run `check` for several jobs at a time and return the verdicts in order.

    Args:
        jobs: For each, the positional arguments of `check`.
        workers: Maximum number of jobs at once; None: one per processor.
    """
    with ThreadPoolExecutor(workers or cpu_cores()) as pool:
        return list(pool.map(lambda job: check(*job, seconds=seconds, memory_mib=memory_mib), jobs))


def _memory_file(text: str) -> int:
    """Return the descriptor of an anonymous file in memory with this text, positioned at its beginning."""
    if sys.platform != "linux":
        raise RunError(
            "sandbox: it needs Linux, so no code of a model is run here; use a reward or a task without code"
        )
    descriptor = os.memfd_create("sandbox")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode(errors="replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class _Server:
    """Connection to the fork server of this process, which is started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def request(
        self, request: bytes, files: tuple[int, int], wall_seconds: float
    ) -> dict[str, object] | None:
        """Return the outcome of a check; None if the server ended without one or is late."""
        result, result_writer = socket.socketpair()
        with result:
            with result_writer, self._lock:
                for descriptor in files:
                    os.lseek(descriptor, 0, os.SEEK_SET)
                try:
                    socket.send_fds(self._connection(), [request], [result_writer.fileno(), *files])
                except OSError:
                    self.stop()
                    return None
            result.settimeout(START_SECONDS + 2 * wall_seconds)
            data = b""
            try:
                while part := result.recv(4096):
                    data += part
            except (TimeoutError, ConnectionResetError):
                return None
        return json.loads(data) if data else None

    def _connection(self) -> socket.socket:
        """Return the control socket, after starting the server if it does not run."""
        if self._control is not None:
            return self._control
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._process = subprocess.Popen(
                # No user or system site-packages, no bytecode files, no unsafe path. PYTHONHASHSEED makes hashes
                # reproducible.
                [sys.executable, "-s", "-S", "-B", "-P", *SERVER, str(server_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(server_end.fileno(),),
                env={"PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(deskside.__file__).parent.parent)},
                cwd="/",
                start_new_session=True,  # Ctrl-C must not reach the server
            )
        return self._control

    def stop(self) -> None:
        """Kill the server and its running checks. The next check starts a new server."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def forget(self) -> None:
        """Drop the connection in a forked child of this process, because the server serves only its parent."""
        if self._control is not None:
            self._control.close()
        _Server.__init__(self)


_server = _Server()
atexit.register(_server.stop)
os.register_at_fork(after_in_child=_server.forget)
