"""Run a function in a child process with a time limit.

An out-of-memory error or an illegal access leaves a CUDA process unusable, a library may abort it, and a compiler may
hang. Experiments on a device therefore run in a child process, where each of these is a result and not a crash.

The child gets the function as "module:function" and its arguments as JSON. The result comes back as JSON in a file,
because libraries print to the standard streams. The child leads its own session, so that its compile workers can be
killed with it. `cpu_cores` says how many children can work at once.
"""

import contextlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from deskside.utils.parsing import Unreadable, json_value

Status = Literal["ok", "oom", "failed", "timeout"]
CGROUP = Path("/sys/fs/cgroup")
STDERR_TAIL = 4000  # bytes of the child's standard error that are kept


@dataclass(frozen=True)
class Outcome:
    """Result of a child process: the returned `value` for status "ok", else the exception as one line in `error`."""

    status: Status
    value: Any
    error: str
    seconds: float
    stderr: str = ""


def run(
    target: str,
    arguments: Mapping[str, Any],
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Call `target` ("package.module:function") with keyword arguments in a new Python process.

    After `timeout` seconds the child and all its processes are killed. Arguments and result must be JSON.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deskside-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "stderr.txt"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "deskside.utils.child_process", target, str(answer)],
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
            try:
                process.communicate(json.dumps(dict(arguments)).encode(), timeout=timeout)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - began
                _end(process)
                return Outcome("timeout", None, f"no answer within {timeout:.0f} s", seconds, _tail(log))
            finally:
                _end(process)  # its compile workers, and on Ctrl-C the child too
        seconds = time.monotonic() - began
        code = process.returncode
        reason = f"the process ended with exit code {code} and no answer"
        if code < 0:
            reason = f"the process was ended by {signal.Signals(-code).name}"
        if answer.exists():
            try:
                result = json_value(answer.read_bytes())
                return Outcome(result["status"], result["value"], result["error"], seconds, _tail(log))
            except (
                Unreadable,
                KeyError,
                TypeError,
            ) as error:  # killed, or the disk was full, while it was writing
                reason = f"its result is damaged ({error})"
        return Outcome("failed", None, reason, seconds, _tail(log))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the host ran out of memory."""
    text = str(error).lower()
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, MemoryError) or "OutOfMemoryError" in names or "out of memory" in text


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # all processes of the session have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_bytes()[-STDERR_TAIL:].decode(errors="replace")


def _child(target: str, answer: Path) -> None:
    arguments = json_value(sys.stdin.read())
    # An exception is a result too; its traceback still goes to the log.
    sys.excepthook = lambda kind, error, trace: _report_error(answer, kind, error, trace)
    module, function = target.split(":")
    value = getattr(import_module(module), function)(**arguments)
    _write(answer, {"status": "ok", "value": value, "error": ""})


def _report_error(
    answer: Path, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    first = (str(error).strip() or kind.__name__).splitlines()[0]
    status = "oom" if is_out_of_memory(error) else "failed"
    _write(answer, {"status": status, "value": None, "error": f"{kind.__name__}: {first}"[:500]})
    sys.__excepthook__(kind, error, trace)


def _write(answer: Path, result: dict[str, Any]) -> None:
    partial = answer.with_suffix(".tmp")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(answer)


def cpu_name() -> str:
    """Return the CPU's name as the system tells it."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def cpu_cores(cgroup: Path = CGROUP) -> int:
    """Return how many CPU cores this process may use: those of its affinity, limited by its container's quota.

    cgroup: where control groups are mounted. In a container these are the container's own.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Return the CPU seconds per second (cgroup v2: "max 100000" or "150000 100000"; v1: two files). None: no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            limit, period = (
                (cgroup / "cpu" / f"cpu.cfs_{what}_us").read_text("ascii") for what in ("quota", "period")
            )
        except OSError:
            return None
    try:
        share = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return share if share > 0 else None


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
