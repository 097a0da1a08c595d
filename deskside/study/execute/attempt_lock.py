"""A lock that a trial's process on another machine holds until it ends, even if the study has lost its connection."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from deskside.study.execute.trial_process import SAVE_TIMEOUT
from deskside.utils.errors import RunError

POLL_SECONDS = 0.1


@contextlib.contextmanager
def attempt_lock(run: Path) -> Iterator[int]:
    """Wait for the lock of a run and yield its descriptor. Raises RunError after SAVE_TIMEOUT."""
    deadline = time.monotonic() + SAVE_TIMEOUT
    _file(run).parent.mkdir(parents=True, exist_ok=True)
    with _file(run).open("w") as file:
        while not _locked(file.fileno()):
            if time.monotonic() > deadline:
                raise RunError(f"{run}: a process of an earlier attempt is still running; end it first")
            time.sleep(POLL_SECONDS)
        yield file.fileno()


def is_idle(run: Path) -> bool:
    """Return True if no process holds the lock of a run."""
    if not _file(run).exists():
        return True
    with _file(run).open("w") as file:
        return _locked(file.fileno())


def _file(run: Path) -> Path:
    """Return the locked file. It is not in the run directory, which may be deleted."""
    return run.parent / f".{run.name}.lock"


def _locked(descriptor: int) -> bool:
    """Lock a file and return True, or return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
