"""Run generated code against tests, so that it can neither do harm nor fake a pass.

Guaranteed, by the Linux kernel (seccomp and resource limits, no root needed), for everything that the code does:

    files       none can be opened, made, changed or listed, for reading as little as for writing
    network     no socket can be made
    processes   none can be started, no thread either, and no signal sent to another one
    memory      an upper bound, of address space; time: of processor seconds and by the clock
    inheritance no environment, no open file but its source, a socket to its judge and /dev/null
    output      goes nowhere
    leftovers   none: the kernel kills every process of the sandbox when its caller ends, however it ends

The verdict is decided in another process, the judge, in which no code of the model ever runs. Only plain values enter
it, as data. So nothing that the code does inside its own process can reach the verdict: neither changing `assert`,
`==`, built-in functions, modules, frames or memory, nor ending the process early with any exit code, nor writing to
any descriptor. The code's process holds no secret: it never learns the tests or the expected values.

Objects of the code's own classes stay in its process; the tests hold references. The code answers what the tests ask
of such an object (attributes, methods, length, iteration), but a plain value never equals one, and it is never told
what it is compared with. What cannot be guaranteed:

    - tests that let the code decide: `assert f(x) == Point(1, 2)` with a class Point of the code, or a helper that the
      tests call and only the code defines. Give `entry_point` and `helpers` where they are known.
    - anything against a bug of the kernel or of Python itself, and the secrecy of the processor's side channels
    - that the tests mean what they should. Tests that use nothing of the code never pass.

Not possible inside: modules beyond the common ones of the standard library (`sandboxed.lock.PRELOADED`), temporary
files, threads. Instances of the tests' own classes cannot be passed to the code; subclasses of int, str, list and other
plain types arrive as their base.

Another system than Linux on x86-64 or ARM64 has none of this, and there code is not run at all (RunError).
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
WALL_FACTOR = 3.0  # a busy machine gives a process a third of its time
MEMORY_MIB = 512
SERVER = ("-m", "deskside.evaluate.sandboxed.fork_server")


@dataclass(frozen=True)
class SandboxResult:
    """The verdict of the tests. reason: why they failed, an exception or what stopped them."""

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
    """Run `code`, then `tests`, which call its functions and raise where it is wrong.

    Args:
        entry_point: The function under test, if known. Only it must come from the code.
        helpers: Trusted source that the tests may use, such as the prompt of the task. The code cannot replace what it
            defines, except `entry_point`.
        seconds: Processor time of each of the two processes; three times as long by the clock.
        memory_mib: Address space of each of the two processes; an empty one takes about 40.

    Raises RunError where this machine cannot lock the processes.
    """
    wall_seconds = WALL_FACTOR * seconds
    request = {"seconds": seconds, "wall_seconds": wall_seconds, "memory_bytes": memory_mib << 20}
    judged = json.dumps({"tests": tests, "helpers": helpers, "entry_point": entry_point})
    code_file, tests_file = _file(code), _file(judged)
    try:
        outcome = None
        for _ in range(2):  # once more if the server was killed, by the kernel's want of memory for instance
            outcome = _server.ask(json.dumps(request).encode(), (code_file, tests_file), wall_seconds)
            if outcome is not None:
                break
    finally:
        os.close(code_file)
        os.close(tests_file)
    if outcome is None:
        raise RunError(
            "sandbox: its server ended twice without a verdict; look for want of memory in the kernel's log"
        )
    if "refused" in outcome:
        raise RunError(
            f"sandbox: this system does not let a process give up its rights ({outcome['refused']}; it takes Linux "
            "with seccomp on x86-64 or ARM64), so no code of a model is run here; use a reward or a task without code"
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
        jobs: The positional arguments of `check` for each.
        workers: How many run at once; None is one per processor.
    """
    with ThreadPoolExecutor(workers or cpu_cores()) as pool:
        return list(pool.map(lambda job: check(*job, seconds=seconds, memory_mib=memory_mib), jobs))


def _file(text: str) -> int:
    """Return the descriptor of an anonymous file with this text, at its beginning."""
    if sys.platform != "linux":
        raise RunError(
            "sandbox: it takes Linux; no code of a model is run here; use a reward or a task without code"
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

    def ask(self, request: bytes, files: tuple[int, int], wall_seconds: float) -> dict[str, object] | None:
        """Return the outcome of a check; None if the server ended before there was one."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs, self._lock:
                for descriptor in files:
                    os.lseek(descriptor, 0, os.SEEK_SET)
                try:
                    socket.send_fds(self._started(), [request], [theirs.fileno(), *files])
                except OSError:
                    self.stop()
                    return None
            mine.settimeout(START_SECONDS + 2 * wall_seconds)
            data = b""
            try:
                while part := mine.recv(4096):
                    data += part
            except TimeoutError:
                return None
            except ConnectionResetError:
                return None
        return json.loads(data) if data else None

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                # No site-packages, no user folder, no bytecode written. Hashes are the same every time.
                [sys.executable, "-s", "-S", "-B", "-P", *SERVER, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(deskside.__file__).parent.parent)},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the caller
            )
        return self._control

    def stop(self) -> None:
        """End the server and its checks; the next one starts a new server."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def forget(self) -> None:
        """Drop the connection in a forked child of this process: the server answers its parent alone."""
        if self._control is not None:
            self._control.close()
        _Server.__init__(self)


_server = _Server()
atexit.register(_server.stop)
os.register_at_fork(after_in_child=_server.forget)
