"""A trial in a separate process, which saves and stops if the study's process ends.

The study writes the job as one line of JSON to the standard input of the trial's process, and keeps the pipe open. When
the study ends for any reason, the pipe closes; then the trial saves and stops at the end of its step. It records how
it ended in trial.json in its run directory, so that the outcome is known even if the study died first.

Each trial's process leads a separate session. So Ctrl-C in the terminal reaches only the study, which then asks its
trials to stop, and a trial can be killed together with its child processes (compile workers).

Imports take several seconds, much of a short trial. Therefore the process of the next trial can be started while
another trial trains; it imports what it needs and waits for its job (`WaitingProcess`).
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
from typing import IO, Any

import deskside
from deskside.run.record import number
from deskside.study.results import Status
from deskside.train.preflight import set_cublas_workspace
from deskside.utils.child_process import is_out_of_memory
from deskside.utils.errors import RunError, UsageError, chain_of, first_line
from deskside.utils.files import write_atomically
from deskside.utils.parsing import json_value

OUTCOME_FILE, LOG_FILE = "trial.json", "output.log"
# Statuses besides those in study/results.py, after which the trial is pending again.
DISK_FULL = "full"  # ends the study, because every further trial would fail as well
STOPPED = "stopped"  # saved and stopped on request
LOST = "lost"  # the machine that it ran on has died
# 1 for every other status; 74 is EX_IOERR of sysexits.h.
EXIT_CODES = {"finished": 0, STOPPED: 0, DISK_FULL: 74}
SAVE_TIMEOUT = 600.0  # seconds for a trial to save after its study has ended
WAIT = "--wait"  # argument of a process that imports IMPORTS before it reads its job
IMPORTS = "deskside.train.training_run"
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Messages of libraries that report a full disk without an errno.
DISK_FULL_MESSAGES = ("no space left on device", "disk is full", "disk quota exceeded", "os error 28")


@dataclass(frozen=True)
class TrialJob:
    """The job of a trial's process.

    Attributes:
        target: "MODULE:FUNCTION", called with this job. Returns (status, reason).
        run: The trial's run directory.
        config: The run's configuration as JSON data.
        command: Command line of the study, recorded in the run.
        resume: True to continue from the newest checkpoint.
        memory_fraction: Share of the GPU memory that the process may use.
        keep_model: Whether the trained model is kept. Writing it takes seconds, as long as a tenth of a short trial.
    """

    target: str
    run: str
    config: dict[str, Any]
    command: str
    resume: bool
    memory_fraction: float
    keep_model: bool = False


@dataclass(frozen=True)
class TrialEnd:
    """The end of a trial's process.

    Attributes:
        status: A status of study/results.py, DISK_FULL or STOPPED.
        reason: One line, or "".
        seconds: Lifetime of the process.
    """

    status: str
    reason: str
    seconds: float


class WaitingProcess:
    """A trial's process without a job. Arguments: as of `TrialProcess`. It ends when the study does."""

    def __init__(self, environment: Mapping[str, str], lock: int | None = None):
        self._process: subprocess.Popen[bytes] | None = _start(environment, lock, subprocess.DEVNULL, WAIT)

    def take(self, job: TrialJob) -> "subprocess.Popen[bytes] | None":
        """Give the job to the process and return it, or None if it has ended."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        try:
            _send(process, job)
        except BrokenPipeError:
            process.wait()
            return None
        return process

    def close(self) -> None:
        """End the process if it has no job."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class TrialProcess:
    """A trial's process as seen by the study.

    Args:
        environment: Additional environment variables.
        lock: Descriptor of a locked file. The trial's process inherits it, so the file stays locked until both end.
        waiting: The process to use, if it has not ended. It was started with the same environment and lock.
    """

    def __init__(
        self,
        job: TrialJob,
        environment: Mapping[str, str],
        lock: int | None = None,
        waiting: WaitingProcess | None = None,
    ):
        self.job, self.folder = job, Path(job.run)
        self._stop_requested = False
        self._started = time.monotonic()
        self._progress = Progress(self.folder)
        (self.folder / OUTCOME_FILE).unlink(missing_ok=True)
        process = None if waiting is None else waiting.take(job)
        if process is None:
            with (self.folder / LOG_FILE).open("ab") as log:
                process = _start(environment, lock, log)
            with contextlib.suppress(BrokenPipeError):  # the process has ended already; `poll` returns how
                _send(process, job)
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> TrialEnd | None:
        """Return how the process ended, and kill the child processes that it left; or return None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        seconds = time.monotonic() - self._started
        self.kill()  # its child processes may still run
        outcome = read_outcome(self.folder)
        if outcome is not None:
            status, reason = outcome
            if status == STOPPED and not self._stop_requested:
                return TrialEnd("killed", reason, seconds)
            return TrialEnd(status, reason, seconds)
        if self._stop_requested:
            return TrialEnd(STOPPED, "stopped with the study", seconds)
        if code == EXIT_CODES[DISK_FULL]:
            return TrialEnd(DISK_FULL, f"{self.folder}: no space left on device", seconds)
        if code < 0:
            return TrialEnd("killed", describe_signal(-code), seconds)
        log = self.folder / LOG_FILE
        return TrialEnd("failed", f"the process ended with exit code {code}; see {log}", seconds)

    def seconds_without_progress(self) -> float:
        return self._progress.seconds_without()

    def kill_hung(self, reason: str) -> TrialEnd:
        """Kill a process that makes no progress. An outcome that it has already recorded is still valid."""
        self.kill()
        end = self.poll()
        assert end is not None  # `kill` waits for the process
        return replace(end, status="failed", reason=reason) if end.status == "killed" else end

    def stop(self) -> None:
        """Ask the process to save and end."""
        self._stop_requested = True
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its child processes, and wait for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # already gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


def _start(
    environment: Mapping[str, str], lock: int | None, log: "IO[bytes] | int", *arguments: str
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "deskside.study.execute.trial_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**os.environ, **environment},
        pass_fds=() if lock is None else (lock,),
    )


def _send(process: "subprocess.Popen[bytes]", job: TrialJob) -> None:
    """Write the job to a process. Raises BrokenPipeError if it has ended."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
    process.stdin.flush()


class Progress:
    """Watches a run directory for progress."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._last = time.monotonic()
        self._modification_times: tuple[int, ...] = ()

    def seconds_without(self) -> float:
        """Return the seconds since a call last found a new logged step or checkpoint; 0 on the first call."""
        times = tuple(_modification_time(self.folder / name) for name in ("metrics.jsonl", "checkpoints"))
        if times != self._modification_times:
            self._modification_times, self._last = times, time.monotonic()
        return time.monotonic() - self._last


def read_outcome(folder: Path) -> tuple[str, str] | None:
    """Return (status, reason) from trial.json in a run directory, or None if it is missing or damaged."""
    try:
        outcome = json_value((folder / OUTCOME_FILE).read_bytes())
        return str(outcome["status"]), str(outcome["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _modification_time(path: Path) -> int:
    """Return the modification time of a file or folder in nanoseconds, or 0 if it is missing."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def describe_signal(number: int) -> str:
    """Describe the signal that ended a process, in one line."""
    hint = (
        " (the kernel kills processes when the host runs out of memory)" if number == signal.SIGKILL else ""
    )
    return f"the process was killed by {signal.Signals(number).name}{hint}"


def classify(error: BaseException) -> tuple[str, str]:
    """Return (status, one-line reason) for the exception that ended a trial."""
    text = first_line(error)[:500]
    if _disk_is_full(error):
        return DISK_FULL, text
    if isinstance(error, UsageError):
        return "refused", text
    if is_out_of_memory(error) or "CUBLAS_STATUS_ALLOC_FAILED" in text:
        return "oom", text
    if isinstance(error, RunError):
        from deskside.train.loop.guard import Diverged

        return ("diverged" if isinstance(error, Diverged) else "failed"), text
    return "failed", f"{type(error).__name__}: {text}"


def train(job: TrialJob) -> tuple[str, str]:
    """Start or resume the run of a trial. Returns (status, reason)."""
    from deskside.config.run import RunConfig

    config, run = RunConfig.model_validate(job.config), Path(job.run)
    set_cublas_workspace(config)

    import torch

    from deskside.run.directory import RunDirectory
    from deskside.train import training_run

    if config.compute.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(job.memory_fraction)
    if job.resume:
        outcome = training_run.resume(run, keep_model=job.keep_model)
    else:
        outcome = training_run.start(config, RunDirectory(run), job.command, keep_model=job.keep_model)
    if outcome.status != "finished":
        return STOPPED, f"stopped by {outcome.status}"
    return outcome_of_summary(outcome.summary)


def outcome_of_summary(summary: Mapping[str, Any]) -> tuple[Status, str]:
    """Return (status, reason) of a run with this summary, in which a loss that is not finite may be None."""
    if number(summary.get("val_bpb", 0.0)) is None:
        return "diverged", "the validation loss at the end is not finite"
    return "finished", ""


def _disk_is_full(error: BaseException | None) -> bool:
    """Return True if this error, or an error in its chain of causes, was caused by a full disk."""
    for one in chain_of(error):
        if isinstance(one, OSError) and one.errno in DISK_FULL_ERRNOS:
            return True
        if any(message in str(one).lower() for message in DISK_FULL_MESSAGES):
            return True
    return False


def _read_job() -> TrialJob:
    """Read the job, which is all that the study writes to standard input."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 4096)
        if not chunk:
            raise SystemExit("deskside.study.execute.trial_process must be started by deskside study")
        line += chunk
    return TrialJob(**json_value(line))


def _stop_with_study() -> None:
    """Wait until the study closes standard input. Then ask this process to save and stop; kill it if it does not."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_TIMEOUT)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> int:
    """Run the trial that standard input describes. Returns the exit code."""
    waits = sys.argv[1:] == [WAIT]
    if waits:
        import_module(IMPORTS)
    job = _read_job()
    if waits:
        deskside.STARTED = time.perf_counter()
        with (Path(job.run) / LOG_FILE).open("ab") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
    threading.Thread(target=_stop_with_study, daemon=True).start()
    module, function = job.target.split(":")
    try:
        status, reason = getattr(import_module(module), function)(job)
    # Any exception is a result of the trial. The traceback goes to its log.
    except Exception as error:  # noqa: BLE001
        status, reason = classify(error)
        sys.excepthook(type(error), error, error.__traceback__)
    with contextlib.suppress(RunError):  # without the file, the study uses the exit code
        text = json.dumps({"status": status, "reason": reason}) + "\n"
        write_atomically(Path(job.run) / OUTCOME_FILE, text)
    return EXIT_CODES.get(status, 1)


if __name__ == "__main__":
    sys.exit(main())
