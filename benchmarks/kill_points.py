"""Kill a process with SIGKILL at a chosen moment of writing a file.

`install` wraps the calls with which deskside writes files atomically: os.fsync, os.replace and os.rename. The process
group is killed around the chosen call:

    fsync      before a flush: the file is written under a temporary name, but not on disk
    replace    before a rename: the file is on disk, but does not have its final name
    replaced   right after the rename
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = ("fsync", "replace", "replaced")


class KillPoints:
    """Counts the moments of each kind, and kills this process group at number `at` of kind `point`.

    The counts, the name of the file at which the process was killed, and whether another thread than the main one was
    writing it (a checkpoint in the background), are written to `record` as JSON.
    """

    def __init__(self, record: Path, point: str | None = None, at: int = 0) -> None:
        self.record, self.point, self.at = record, point, at
        self.counts = dict.fromkeys(POINTS, 0)
        self.owner = os.getpid()

    def install(self) -> None:
        """Replace os.fsync, os.replace and os.rename with functions that count."""
        fsync = os.fsync

        def counted_fsync(descriptor: int) -> None:
            self._moment("fsync", Path(f"/proc/self/fd/{descriptor}").resolve())
            fsync(descriptor)

        os.fsync = counted_fsync
        os.replace = self._counted_rename(os.replace)
        os.rename = self._counted_rename(os.rename)

    def _counted_rename(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(source: Any, target: Any, **options: Any) -> None:
            self._moment("replace", Path(os.fspath(target)))
            function(source, target, **options)
            self._moment("replaced", Path(os.fspath(target)))

        return counted

    def _moment(self, kind: str, path: Path) -> None:
        if os.getpid() != self.owner or path == self.record:
            return
        self.counts[kind] += 1
        if kind == self.point and self.counts[kind] == self.at:
            background = threading.current_thread() is not threading.main_thread()
            entry = {"killed_at": path.name, "background": background, "counts": self.counts}
            self.record.write_text(json.dumps(entry))
            os.killpg(0, signal.SIGKILL)

    def finish(self) -> None:
        """Write the counts of a process that was not killed."""
        self.record.write_text(json.dumps({"killed_at": None, "counts": self.counts}))
