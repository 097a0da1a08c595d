"""A process that kills itself with SIGKILL at a chosen moment of its writes.

`install` wraps the calls with which deskside writes files atomically: os.fsync, os.replace and os.rename. The process
group is killed around the chosen call:

    fsync      everything is written under a temporary name, but not flushed to disk
    replace    it is on disk, but does not have its final name
    replaced   it has its final name, and nothing has been done since
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = ("fsync", "replace", "replaced")


class KillPoints:
    """Counter of the moments of each kind, which kills this process group at number `at` of kind `point`.

    The counts and the place of the kill are written to `record` as JSON.
    """

    def __init__(self, record: Path, point: str | None = None, at: int = 0) -> None:
        self.record, self.point, self.at = record, point, at
        self.counts = dict.fromkeys(POINTS, 0)
        self.owner = os.getpid()

    def install(self) -> None:
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self._moment("fsync", Path(f"/proc/self/fd/{descriptor}").resolve())
            fsync(descriptor)

        os.fsync = counted
        os.replace = self._renaming(os.replace)
        os.rename = self._renaming(os.rename)

    def _renaming(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def renamed(source: Any, target: Any, **given: Any) -> None:
            self._moment("replace", Path(os.fspath(target)))
            function(source, target, **given)
            self._moment("replaced", Path(os.fspath(target)))

        return renamed

    def _moment(self, kind: str, path: Path) -> None:
        if os.getpid() != self.owner or path == self.record:
            return
        self.counts[kind] += 1
        if kind == self.point and self.counts[kind] == self.at:
            self.record.write_text(json.dumps({"killed_at": path.name, "counts": self.counts}))
            os.killpg(0, signal.SIGKILL)

    def finish(self) -> None:
        """Write the counts."""
        self.record.write_text(json.dumps({"killed_at": None, "counts": self.counts}))
