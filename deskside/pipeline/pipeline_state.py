"""go.json: the current phase of a pipeline and the time it has spent.

The time budget counts the wall-clock time of every process that ran the pipeline, from its start (before the imports)
to its end. A thread records it every `BEAT` seconds, so a kill loses no more than that; time between processes does not
count. The file is replaced atomically and exists from the first moment, so every phase can be resumed.
"""

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deskside
from deskside.pipeline.state_schema import PHASES, SCHEMA, Phase, problem
from deskside.run.directory import RunDirectory
from deskside.utils.errors import RunError, UsageError

FILE = "go.json"
BEAT = 2.0  # seconds between two writes of the spent time
# Reserved for what follows training: samples, the report, exiting. It took 3 to 5 s on two CPU cores.
TAIL_SECONDS, TAIL_SHARE = 6.0, 0.005
MAX_CONTENTION = 4.0  # a higher load says little about a single-threaded process


def contention() -> float:
    """Return how many processes share a CPU core (load average of the last minute), at least 1."""
    return min(MAX_CONTENTION, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def tail_seconds(hours: float) -> float:
    """Return the seconds reserved for what follows training: more on a busy machine."""
    return TAIL_SECONDS * contention() + TAIL_SHARE * hours * 3600


def damaged(path: Path, why: str) -> RunError:
    """Return the error for a go.json that cannot be resumed."""
    return RunError(
        f"{path / FILE}: is damaged or was written by another version ({why}); restore it, or start again"
    )


class PipelineState:
    """State of one pipeline. `data` is the content of go.json, `before` the seconds of earlier processes."""

    def __init__(self, run: RunDirectory, data: dict[str, Any]):
        self.run, self.data = run, data
        self.before = float(data["spent_seconds"])
        self._lock = threading.Lock()

    @classmethod
    def begin(
        cls,
        run: RunDirectory,
        hours: float,
        options: dict[str, Any],
        command: str,
        spent: float = 0.0,
        phase: Phase = PHASES[0],
        results: Mapping[str, Any] | None = None,
    ) -> "PipelineState":
        """Create the state of a new pipeline in an empty run directory.

        A pipeline that continues in another run passes the seconds it has `spent`, its phase and its results.
        """
        data = {
            "schema_version": SCHEMA,
            "hours": hours,
            "spent_seconds": spent,
            "phase": phase,
            "command": command,
            "options": options,
            "results": dict(results or {}),
            "continued_in": None,
        }
        state = cls(run, data)
        state.note()
        return state

    @classmethod
    def open(cls, path: Path) -> "PipelineState":
        """Open the state of an earlier process. Raises UsageError if there is none, RunError if it is damaged."""
        if not (path / FILE).is_file():
            begun = (entry for entry in path.rglob("*") if entry.is_file() and entry.name != f".{FILE}.tmp")
            if path.is_dir() and not any(begun):
                raise UsageError(
                    f"{path}: was stopped before its first phase; delete the folder and start again"
                )
            raise UsageError(
                f"{path}: has no pipeline to resume (no {FILE}); start one with: deskside go --hours H"
            )
        run = RunDirectory(path)
        data = run.read_json(FILE)
        why = problem(data, path)
        if why is not None:
            raise damaged(path, why)
        return cls(run, data)

    # The clock

    def seconds(self) -> float:
        """Return the seconds spent so far, including this process."""
        return self.before + time.perf_counter() - deskside.STARTED

    @property
    def hours(self) -> float:
        """The time budget."""
        return float(self.data["hours"])

    def left(self) -> float:
        """Return the seconds left of the time budget; negative when it is exceeded."""
        return self.hours * 3600 - self.seconds()

    def tail(self) -> float:
        """Return the seconds reserved for what follows training."""
        return tail_seconds(self.hours)

    # The phases

    @property
    def phase(self) -> Phase:
        phase: Phase = self.data["phase"]
        return phase

    def enter(self, phase: Phase) -> None:
        """Record the beginning of a phase."""
        self._set(self.data, "phase", phase)

    def result(self, phase: str) -> dict[str, Any]:
        """Return the result of a phase; empty if it has not finished."""
        return dict(self.data["results"].get(phase, {}))

    def keep(self, phase: str, result: dict[str, Any]) -> None:
        """Record the result of a phase."""
        self._set(self.data["results"], phase, result)

    @property
    def continued_in(self) -> Path | None:
        """The run, in the same directory, in which the pipeline continues."""
        name = self.data.get("continued_in")
        return None if name is None else self.run.path.parent / Path(name).name

    def continue_in(self, run: RunDirectory) -> None:
        """Continue in another run of the same directory. Only its name is kept, so both can be moved together."""
        self._set(self.data, "continued_in", run.path.name)

    def drop_target(self) -> None:
        """Remove the target loss, so that a resumed pipeline does not stop for it again."""
        self._set(self.data["options"], "target_loss", None)

    def _set(self, where: dict[str, Any], key: str, value: Any) -> None:
        with self._lock:  # the beat thread copies the data
            where[key] = value
        self.note()

    def note(self) -> None:
        """Write go.json. Raises RunError if that fails."""
        with self._lock:
            self.data["spent_seconds"] = round(self.seconds(), 3)
            self.run.write_json(FILE, copy.deepcopy(self.data))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the pipeline's lock and record the spent time periodically.

        Raises UsageError if another process runs the pipeline.
        """
        with self.run.lock(".go.lock", "is running this pipeline"):
            ended = threading.Event()
            beating = threading.Thread(target=self._beat, args=(ended,), daemon=True)
            beating.start()
            try:
                yield
            finally:
                ended.set()
                beating.join()
                self.note()

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT):
            # A missed beat only loses seconds. A full disk fails where the pipeline writes something it needs.
            with contextlib.suppress(RunError):
                self.note()
