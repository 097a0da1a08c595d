"""Run a function in a child process with a time limit.

An illegal memory access leaves a CUDA process unusable, a library or the kernel's out-of-memory killer may end it, and
a compiler may hang. Experiments on a device therefore run in a child process, and each of these failures becomes a
`ProcessOutcome`.

The child gets the function as "module:function" and its arguments as JSON. The result comes back as JSON in a file,
because libraries print to the standard streams. The child leads its own process group, so that its compile workers can
be killed with it.
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

from deskside.utils.errors import first_line
from deskside.utils.parsing import Unreadable, json_value
from deskside.utils.quick_start import quick_imports

Status = Literal["ok", "oom", "failed", "timeout"]
CGROUP = Path("/sys/fs/cgroup")
OUTPUT_TAIL = 4000  # bytes of the child's output that are kept


@dataclass(frozen=True)
class ProcessOutcome:
    """The result of a child process.

    value: what the function returned, for status "ok". error: one line that describes the failure, otherwise.
    output: the end of the child's standard output and standard error. died: it ended without an answer, not even the
    one that it gives for an exception.
    """

    status: Status
    value: Any
    error: str
    seconds: float
    output: str = ""
    died: bool = False


def run(
    target: str,
    arguments: Mapping[str, Any],
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> ProcessOutcome:
    """Call `target` ("package.module:function") with keyword arguments in a new Python process.

    When it ends, or after `timeout` seconds, its process group is killed. Arguments and result must be JSON.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deskside-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "deskside.utils.child_process", target, str(answer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
            try:
                process.communicate(json.dumps(dict(arguments)).encode(), timeout=timeout)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - start
                _kill_group(process)
                return ProcessOutcome(
                    "timeout", None, f"no answer within {timeout:.0f} s", seconds, _tail(log)
                )
            finally:
                _kill_group(process)  # the child's compile workers, and on Ctrl-C the child too
        seconds = time.monotonic() - start
        code = process.returncode
        if code < 0:
            reason = f"the process was ended by {signal.Signals(-code).name}"
        else:
            reason = f"the process ended with exit code {code} and no answer"
        if answer.exists():
            try:
                result = json_value(answer.read_bytes())
                return ProcessOutcome(result["status"], result["value"], result["error"], seconds, _tail(log))
            except (Unreadable, KeyError, TypeError) as error:
                reason = f"its result is damaged ({error})"
        return ProcessOutcome("failed", None, reason, seconds, _tail(log), died=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the type or message of an error says that a GPU or the host ran out of memory."""
    # Compared by name, because importing torch takes seconds.
    class_names = {kind.__name__ for kind in type(error).__mro__}
    out_of_memory = isinstance(error, MemoryError) or "OutOfMemoryError" in class_names
    return out_of_memory or "out of memory" in str(error).lower()


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # if all processes of the group have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_bytes()[-OUTPUT_TAIL:].decode(errors="replace")


def _run_child(target: str, answer: Path) -> None:
    """Call the function in this process, and write its result or exception to the file `answer`."""
    arguments = json_value(sys.stdin.read())
    # Report an exception as the result; its traceback still goes to standard error.
    sys.excepthook = lambda kind, error, trace: _report_error(answer, kind, error, trace)
    module, function = target.split(":")
    with quick_imports():
        called = getattr(import_module(module), function)
    value = called(**arguments)
    _write(answer, {"status": "ok", "value": value, "error": ""})


def _report_error(
    answer: Path, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    status = "oom" if is_out_of_memory(error) else "failed"
    _write(answer, {"status": status, "value": None, "error": f"{kind.__name__}: {first_line(error)}"[:500]})
    sys.__excepthook__(kind, error, trace)


def _write(answer: Path, result: dict[str, Any]) -> None:
    partial = answer.with_suffix(".tmp")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(answer)


def cpu_name() -> str:
    """Return the CPU's name as the operating system reports it."""
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def cpu_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of CPU cores that this process may use: its affinity, limited by its container's quota.

    cgroup: where control groups are mounted; inside a container, those of the container.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """Return the quota in CPU seconds per second, or None if there is no limit.

    cgroup v2 has one file, with "150000 100000" or "max 100000" (microseconds of quota and period); v1 has two files.
    """
    try:
        limit, period = (cgroup / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text("ascii")
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text("ascii")
        except OSError:
            return None
    try:
        quota = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # the limit is "max"
        return None
    return quota if quota > 0 else None  # v1 has -1 for no limit


if __name__ == "__main__":
    _run_child(sys.argv[1], Path(sys.argv[2]))
