"""A trial in a separate process, which never outlives the study.

The parent writes one line of JSON, the order, to the child's standard input and keeps the pipe open. When the study
ends for any reason, the pipe closes, and the child saves and stops at its next step boundary. The child records how
it ended in trial.json in its run directory, so that the outcome is known even if the study died first.

A child leads its own session, so Ctrl-C in the terminal reaches only the study, which then asks its children to
stop; and its own children (compile workers) end with it.
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from deskside.train.prepare.preflight import set_cublas_workspace
from deskside.utils.child_process import is_out_of_memory
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically
from deskside.utils.parsing import json_value

ANSWER, LOG = "trial.json", "output.log"
FULL = "full"  # the disk is full: ends the study, and the trial has no result
STOPPED = "stopped"  # saved and stopped on request
CODES = {"finished": 0, STOPPED: 0, FULL: 74}  # exit codes; 1 for every other status
SAVING = 600.0  # seconds for a child to save after its study has ended
DISK = (errno.ENOSPC, errno.EDQUOT)
DISK_WORDS = ("no space left on device", "disk is full", "disk quota exceeded", "os error 28")


@dataclass(frozen=True)
class Order:
    """The order to a child process.

    target: "module:function", called with this order. run: the trial's run directory. config: the run's
    configuration as data. resume: continue from the newest checkpoint. memory_fraction: share of the GPU's memory.
    """

    target: str
    run: str
    config: dict[str, Any]
    command: str
    resume: bool
    memory_fraction: float


@dataclass(frozen=True)
class Ended:
    """The end of a child process. status: as in study/results.py, or FULL, or STOPPED. seconds: its lifetime."""

    status: str
    reason: str
    seconds: float


class Child:
    """A trial's process as seen by the study. lock: a descriptor that stays locked until the process has ended."""

    def __init__(self, order: Order, environment: Mapping[str, str], lock: int | None = None):
        self.order, self.folder = order, Path(order.run)
        self._asked = False
        self._began = self._lived = time.monotonic()
        self._seen: tuple[int, ...] = ()
        (self.folder / ANSWER).unlink(missing_ok=True)
        with (self.folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deskside.study.execute.trial_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **environment},
                pass_fds=() if lock is None else (lock,),
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; `poll` reports how
            self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Ended | None:
        """Return how the process ended, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        seconds = time.monotonic() - self._began
        self.kill()  # its remaining children
        answer = read_answer(self.folder)
        if answer is not None:
            status, reason = answer
            if status == STOPPED and not self._asked:
                return Ended("killed", reason, seconds)
            return Ended(status, reason, seconds)
        if self._asked:
            return Ended(STOPPED, "stopped with the study", seconds)
        if code == CODES[FULL]:
            return Ended(FULL, f"{self.folder}: no space left on device", seconds)
        if code < 0:
            return Ended("killed", ended_by(-code), seconds)
        return Ended("failed", f"the process ended with exit code {code}; see {self.folder / LOG}", seconds)

    def silent(self) -> float:
        """Return the seconds since it last logged a step or saved a checkpoint, at first since its start."""
        seen = tuple(_stamp(self.folder / name) for name in ("metrics.jsonl", "checkpoints"))
        if seen != self._seen:
            self._seen, self._lived = seen, time.monotonic()
        return time.monotonic() - self._lived

    def give_up(self, reason: str) -> Ended:
        """Kill a process that shows no sign of life. An answer that it has already written still counts."""
        self.kill()
        ended = self.poll()
        assert ended is not None  # `kill` waits for the process
        return replace(ended, status="failed", reason=reason) if ended.status == "killed" else ended

    def stop(self) -> None:
        """Ask the process to save and end."""
        self._asked = True
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def read_answer(folder: Path) -> tuple[str, str] | None:
    """Return (status, reason) from trial.json, or None if it is missing or damaged."""
    try:
        answer = json_value((folder / ANSWER).read_bytes())
        return str(answer["status"]), str(answer["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stamp(path: Path) -> int:
    """Return the modification time of a file or folder, or 0 if it is missing."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def ended_by(number: int) -> str:
    """Describe the signal that ended a process."""
    hint = (
        " (the kernel kills processes when the host runs out of memory)" if number == signal.SIGKILL else ""
    )
    return f"the process was killed by {signal.Signals(number).name}{hint}"


def classify(error: BaseException) -> tuple[str, str]:
    """Return (status, one-line reason) for the exception that ended a trial."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
    if _disk_is_full(error):
        return FULL, text
    if isinstance(error, UsageError):
        return "refused", text
    if is_out_of_memory(error) or "CUBLAS_STATUS_ALLOC_FAILED" in text:
        return "oom", text
    if isinstance(error, RunError):
        from deskside.train.loop.guard import Diverged

        return ("diverged" if isinstance(error, Diverged) else "failed"), text
    return "failed", f"{type(error).__name__}: {text}"


def train(order: Order) -> tuple[str, str]:
    """Start or resume the run of a trial. Returns (status, reason)."""
    from deskside.config.run import RunConfig

    config, run = RunConfig.model_validate(order.config), Path(order.run)
    set_cublas_workspace(config)

    import torch

    from deskside.run.directory import RunDirectory
    from deskside.train import training_run

    if config.compute.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(order.memory_fraction)
    if order.resume:
        outcome = training_run.resume(run)
    else:
        outcome = training_run.start(config, RunDirectory(run), order.command)
    if outcome.status != "finished":
        return STOPPED, f"stopped by {outcome.status}"
    bpb = outcome.summary["val_bpb"]
    if not abs(bpb) < float("inf"):
        return "diverged", "the validation loss at the end is not finite"
    return "finished", ""


def _disk_is_full(error: BaseException | None) -> bool:
    """Return whether this error, or its cause, is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK:
            return True
        if any(words in str(error).lower() for words in DISK_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read_order() -> Order:
    """Read the first line of standard input, and leave the rest to `_follow`."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 4096)
        if not byte:
            raise SystemExit("deskside.study.execute.trial_process: started without an order")
        line += byte
    return Order(**json_value(line))


def _follow() -> None:
    """Stop together with the study: standard input closes when it ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVING)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> int:
    """Run a trial. Returns the exit code."""
    order = _read_order()
    threading.Thread(target=_follow, daemon=True).start()
    module, function = order.target.split(":")
    try:
        status, reason = getattr(import_module(module), function)(order)
    # Any exception is a result of the trial. The traceback goes to its log.
    except Exception as error:  # noqa: BLE001
        status, reason = classify(error)
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(RunError):  # the exit code still tells the outcome
        text = json.dumps({"status": status, "reason": reason}) + "\n"
        write_atomically(Path(order.run) / ANSWER, text)
    return CODES.get(status, 1)


if __name__ == "__main__":
    sys.exit(main())
