"""A process that `train/launch.py` started, one of several that train together: its start, its error, its end.

It ends with the process that started it, however that ends. Its error goes to the launcher, which prints the one that
caused the others.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import deskside
from deskside.utils.signals import die_with, release

LAUNCHER = "DESKSIDE_LAUNCHER"  # environment variable: process id of the launcher
STARTED = "DESKSIDE_STARTED"  # environment variable: `deskside.STARTED` of the launcher
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable that torch's launcher sets: path of the error

# error: the user can act on it; unexpected: any other, perhaps because another process ended; stopped: by a signal
Kind = Literal["error", "unexpected", "stopped"]


def environment() -> dict[str, str]:
    """Return the environment variables that tell a process that this one launched it."""
    # perf_counter is the system's monotonic clock, the same in all processes.
    return {LAUNCHER: str(os.getpid()), STARTED: repr(deskside.STARTED)}


def is_launched() -> bool:
    """Return True if `train/launch.py` started this process."""
    return LAUNCHER in os.environ


def begin() -> None:
    """In a launched process: end when the launcher ends, and count the run's time from the launcher's start.

    Raises KeyboardInterrupt if Ctrl-C came before, when nothing could have handled it.
    """
    if is_launched():
        die_with(int(os.environ[LAUNCHER]))
        deskside.STARTED = float(os.environ[STARTED])
        release(signal.SIGINT)


def report(text: str, kind: Kind, remedies: Sequence[str] = ()) -> bool:
    """Send the error that ends this process to the launcher. Return False if there is none, or if that failed.

    remedies: of "stopped": what continues the work.
    """
    if not is_launched():
        return False
    seconds = time.time()
    # torch reads `message` and `timestamp`.
    error = {"message": text, "timestamp": int(seconds), "seconds": seconds, "kind": kind}
    error["remedies"] = list(remedies)
    path = Path(os.environ[ERROR_FILE])
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(json.dumps(error), encoding="utf-8")
        partial.rename(path)
    except OSError:  # such as a full disk
        return False
    return True
