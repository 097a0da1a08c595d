"""One trial in a process of its own, which never outlives the study.

The parent writes one line of JSON to the child's standard input, what to do, and keeps that pipe open: when it closes,
the study is gone, however it went, and the child stops at its next step boundary with everything saved. How a trial
ended stands in trial.json in its run directory, so that it is known even if the study died first.

A child leads a session of its own. So Ctrl-C in the terminal reaches the study alone, which then asks its children to
stop, and what a child has started (compile workers) ends with it.
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

from deskside.utils.child_process import is_out_of_memory
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically
from deskside.utils.parsing import json_value

ANSWER, LOG = "trial.json", "output.log"
FULL = "full"  # the disk: no result of the trial, but the end of the study for now
STOPPED = "stopped"  # saved, because it was asked to stop
CODES = {"finished": 0, STOPPED: 0, FULL: 74}  # exit codes; 1 for every other ending
SAVING = 600.0  # seconds that a child whose study is gone may take to save
DISK = (errno.ENOSPC, errno.EDQUOT)
DISK_WORDS = ("no space left on device", "disk is full", "disk quota exceeded", "os error 28")


@dataclass(frozen=True)
class Order:
    """What a child shall do. target: "module:function", called with this order; run: the trial's run directory.

    config: of the run, as plain data; resume: from the run's newest checkpoint; memory_fraction: of the GPU.
    """

    target: str
    run: str
    config: dict[str, Any]
    command: str
    resume: bool
    memory_fraction: float


@dataclass(frozen=True)
class Ended:
    """How a child ended: a status of study/results.py, or FULL, or STOPPED. seconds: from its start to its end."""

    status: str
    reason: str
    seconds: float


class Child:
    """A trial's process, seen from the study. `held`: a file that stays locked until it has ended."""

    def __init__(self, order: Order, environment: Mapping[str, str], held: int | None = None):
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
                pass_fds=() if held is None else (held,),
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: `poll` will tell
            self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Ended | None:
        """How it ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        seconds = time.monotonic() - self._began
        self.kill()  # what it has left behind
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
        """Seconds since it last logged a step, saved a checkpoint or, before those, began."""
        seen = tuple(_stamp(self.folder / name) for name in ("metrics.jsonl", "checkpoints"))
        if seen != self._seen:
            self._seen, self._lived = seen, time.monotonic()
        return time.monotonic() - self._lived

    def give_up(self, reason: str) -> Ended:
        """End at once what shows no sign of life; what it had already answered still counts."""
        self.kill()
        ended = self.poll()
        assert ended is not None  # `kill` waits for it
        return replace(ended, status="failed", reason=reason) if ended.status == "killed" else ended

    def stop(self) -> None:
        """Ask it to save and end."""
        self._asked = True
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def read_answer(folder: Path) -> tuple[str, str] | None:
    """(status, reason) that a trial left in its run directory; None where it left none."""
    try:
        answer = json_value((folder / ANSWER).read_bytes())
        return str(answer["status"]), str(answer["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stamp(path: Path) -> int:
    """When a file or folder was last changed; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def ended_by(number: int) -> str:
    """In words what a signal says of why a process ended."""
    hint = " (the system ends what takes too much of the host's memory)" if number == signal.SIGKILL else ""
    return f"the process was ended by {signal.Signals(number).name}{hint}"


def classify(error: BaseException) -> tuple[str, str]:
    """(status, reason in one line) of a trial that ended with this error."""
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
    """Begin or resume the run of a trial. Returns (status, reason)."""
    from deskside.config.run import RunConfig

    config, run = RunConfig.model_validate(order.config), Path(order.run)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by CUDA when torch starts it

    import torch

    from deskside.run.directory import RunDirectory
    from deskside.train import training_run

    if config.compute.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(order.memory_fraction)
    if order.resume:
        outcome = training_run.resume(run)
    else:
        outcome = training_run.start(
            config, run.parent, None, run.name, order.command, into=RunDirectory(run)
        )
    if outcome.status != "finished":
        return STOPPED, f"stopped by {outcome.status}"
    bpb = outcome.summary["val_bpb"]
    if not abs(bpb) < float("inf"):
        return "diverged", "the validation loss at the end is not finite"
    return "finished", ""


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether this error, or one that it was made from, is the disk's."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK:
            return True
        if any(words in str(error).lower() for words in DISK_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read_order() -> Order:
    """The first line of standard input, byte by byte: what follows it is left for `_follow`."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 4096)
        if not byte:
            raise SystemExit("deskside.study.execute.trial_process: started without an order")
        line += byte
    return Order(**json_value(line))


def _follow() -> None:
    """Stop with the study: standard input ends when it does."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVING)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> int:
    """The child's whole life. Returns its exit code."""
    order = _read_order()
    threading.Thread(target=_follow, daemon=True).start()
    module, function = order.target.split(":")
    try:
        status, reason = getattr(import_module(module), function)(order)
    # A library may raise anything, and all of it is a result. The traceback goes into the trial's log.
    except Exception as error:  # noqa: BLE001
        status, reason = classify(error)
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(RunError):  # the exit code says what it can
        text = json.dumps({"status": status, "reason": reason}) + "\n"
        write_atomically(Path(order.run) / ANSWER, text)
    return CODES.get(status, 1)


if __name__ == "__main__":
    sys.exit(main())
