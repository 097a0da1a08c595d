"""One piece of work in a process of its own, with a time limit.

An out-of-memory error or an illegal access poisons a CUDA process, a library may abort it, and a compiler may hang. So
whatever is tried on a device is tried in a child, and all of these are results, not crashes. The child is told what to
run as "module:function" and gets its arguments as JSON; what the function returns comes back as JSON in a file, since
libraries print what they like. The child leads a session of its own, so that its compile workers end with it.
"""

import contextlib
import json
import os
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
TAIL = 4000  # characters of the child's standard error that are kept


@dataclass(frozen=True)
class Outcome:
    """What came of a child. value: what its function returned (status ok); error: one line, the library's own words."""

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

    timeout: seconds, after which the child and all that it started are killed. Arguments and result must be JSON.
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
                _end(process)  # compile workers, and everything on Ctrl-C
        seconds = time.monotonic() - began
        if answer.exists():
            try:
                result = json_value(answer.read_bytes())
                found = result["status"], result["value"], result["error"]
            except (Unreadable, KeyError, TypeError) as error:  # killed, or out of disk, while it wrote
                return Outcome("failed", None, f"its answer is damaged ({error})", seconds, _tail(log))
            return Outcome(*found, seconds, _tail(log))
        return Outcome("failed", None, _ending(process.returncode), seconds, _tail(log))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    text = str(error).lower()
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, MemoryError) or "OutOfMemoryError" in names or "out of memory" in text


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # it and all that it started have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_bytes()[-TAIL:].decode(errors="replace")


def _ending(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code} and no answer"


def _child(target: str, answer: Path) -> None:
    arguments = json_value(sys.stdin.read())
    # Whatever a library raises on this machine is a result too; the traceback goes to the log as always.
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


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
