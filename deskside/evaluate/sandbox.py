"""Run code that a model wrote, with tests, so that it can neither do harm nor talk itself into a pass.

Guaranteed, by the Linux kernel (seccomp and resource limits, no root needed), for everything that the code does:

    files       none can be opened, made, changed or listed, for reading as little as for writing
    network     no socket can be made
    processes   none can be started, no thread either, and no signal sent to another one
    memory      an upper bound, of address space; time: of processor seconds and by the clock
    inheritance no environment, no open file but its source, a socket to its judge and /dev/null
    output      goes nowhere
    the verdict is made in another process, which gets plain values back. Changing `assert`, `==`, built-in functions or
                modules, ending the process early or printing "passed" changes nothing there

Not guaranteed: anything against a bug of the kernel or of Python itself; secrecy of the processor's side channels; that
the tests mean what they should. Not possible inside: modules beyond the common ones of the standard library
(`sandbox_child.PRELOADED`), temporary files, threads. Tests see functions and plain values of the code: objects of its
own classes cannot leave its process, functions cannot enter it.

Another system than Linux on x86-64 or ARM64 has none of this, and there code is not run at all (RunError).
"""

import json
import math
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deskside.errors import RunError
from deskside.evaluate import sandbox_child
from deskside.facts.cpu import cpu_cores

SECONDS = 10.0
MEMORY_MIB = 512
CHILD = Path(sandbox_child.__file__)


@dataclass(frozen=True)
class Verdict:
    """Whether the tests came to their end, and why not: an exception's name and text, or what stopped it."""

    passed: bool
    reason: str


def check(code: str, tests: str, *, seconds: float = SECONDS, memory_mib: int = MEMORY_MIB) -> Verdict:
    """Run `code`, then `tests`, which call its functions and raise where it is wrong.

    seconds: by the clock, for everything. memory_mib: of address space, for each of the two processes; an empty one
    takes about 40. Raises RunError where this machine cannot lock the processes.
    """
    with ExitStack() as stack:
        mine, theirs = socket.socketpair()
        stack.enter_context(mine)
        stack.enter_context(theirs)
        limits = [str(math.ceil(seconds)), str(memory_mib << 20)]
        solution = _started(stack, "code", code, mine, limits, subprocess.DEVNULL)
        judge = _started(stack, "judge", tests, theirs, limits, subprocess.PIPE)
        mine.close()
        theirs.close()
        try:
            output, _ = judge.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"took longer than {seconds:g} s")
        finally:
            for process in (solution, judge):
                process.kill()
                process.wait()
    if sandbox_child.UNLOCKED in (judge.returncode, solution.returncode):
        raise RunError(
            "sandbox: this system does not let a process give up its rights (it takes Linux with seccomp on x86-64 or "
            "ARM64), so no code of a model is run here; use a reward or a task without code"
        )
    try:
        found = json.loads(output)
    except ValueError:  # killed by a limit
        return Verdict(False, "used too much memory or processor time")
    return Verdict(bool(found["passed"]), str(found["reason"]))


def check_many(
    jobs: Sequence[tuple[str, str]],
    *,
    seconds: float = SECONDS,
    memory_mib: int = MEMORY_MIB,
    workers: int | None = None,
) -> list[Verdict]:
    """`check` for (code, tests) pairs, several at a time; the order is kept. workers: None is one per processor."""
    with ThreadPoolExecutor(workers or cpu_cores()) as pool:
        return list(pool.map(lambda job: check(*job, seconds=seconds, memory_mib=memory_mib), jobs))


def _started(
    stack: ExitStack, role: str, text: str, channel: socket.socket, limits: list[str], output: int
) -> "subprocess.Popen[bytes]":
    """One of the two processes; `text` is its standard input, as a file, so that nobody has to feed it."""
    source = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    source.write(text.encode(errors="replace"))
    source.seek(0)
    return subprocess.Popen(
        # No site, no user folder, no bytecode written, no folder put on the path. Hashes are the same every time.
        [sys.executable, "-s", "-S", "-B", "-P", str(CHILD), role, str(channel.fileno()), *limits],
        stdin=source,
        stdout=output,
        stderr=subprocess.DEVNULL,
        pass_fds=(channel.fileno(),),
        env={"PYTHONHASHSEED": "0"},
        cwd="/",
    )
