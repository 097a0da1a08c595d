"""go.json: the phase, the results and the time spent of a pipeline.

The time budget counts the wall-clock time of every process that ran the pipeline, from its start (before the imports)
to its end. Time between processes does not count, nor does the wait for an answer. A thread records the time every
`SAVE_SECONDS`, so a kill loses no more than that. The file is replaced atomically and exists from the start, so every
phase can be resumed.
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
from deskside.run.continuing import PIPELINE_FILE, resume_command
from deskside.run.directory import RunDirectory
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import TEMPORARY_SUFFIX

SAVE_SECONDS = 2.0  # interval between writes of go.json
# Time reserved for samples, the report and exiting, after training. They took 3 to 5 s on two CPU cores.
TAIL_SECONDS, TAIL_SHARE = 6.0, 0.005
MAX_CONTENTION = 4.0  # a higher load hardly slows a single-threaded process further


def contention() -> float:
    """Return the processes per CPU core, from 1 to MAX_CONTENTION, by the load average of the last minute."""
    return min(MAX_CONTENTION, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def tail_seconds(hours: float) -> float:
    """Return the seconds reserved for the work after training: more on a busy machine."""
    return TAIL_SECONDS * contention() + TAIL_SHARE * hours * 3600


def damaged(path: Path, why: str) -> RunError:
    """Return the error for a go.json that cannot be resumed."""
    return RunError(
        f"{path / PIPELINE_FILE}: is damaged or was written by another version ({why}); restore it, or start again"
    )


class PipelineState:
    """State of a pipeline. data: the content of go.json. spent_before: seconds that earlier processes spent."""

    def __init__(self, run: RunDirectory, data: dict[str, Any]):
        self.run, self.data = run, data
        self.spent_before = float(data["spent_seconds"])
        self._waiting_since: float | None = None
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

        spent, phase, results: of the previous run, if its pipeline continues in this one; `spent` is in seconds.
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
        state.save()
        return state

    @classmethod
    def open(cls, path: Path) -> "PipelineState":
        """Open the state of an earlier process. Raises UsageError if there is none, RunError if it is damaged."""
        if not (path / PIPELINE_FILE).is_file():
            command = resume_command(path)
            files = (entry for entry in path.rglob("*") if entry.is_file())
            if path.is_dir() and all(file.name.endswith(TEMPORARY_SUFFIX) for file in files):
                raise UsageError(
                    f"{path}: was stopped before its first phase; delete the folder and start again"
                )
            remedy = f"continue it with: {command}" if command else "start one with: deskside go --hours H"
            raise UsageError(f"{path}: has no pipeline to resume (no {PIPELINE_FILE}); {remedy}")
        run = RunDirectory(path)
        data = run.read_json(PIPELINE_FILE)
        why = problem(data, path)
        if why is not None:
            raise damaged(path, why)
        return cls(run, data)

    @classmethod
    def of_launcher(cls, path: Path) -> "PipelineState":
        """Open the state of a pipeline that the launcher of this process runs. Raises as `open` does."""
        state = cls.open(path)
        # The file has the time since `deskside.STARTED`, the start of the launcher, already.
        state.spent_before = max(0.0, state.spent_before - (time.perf_counter() - deskside.STARTED))
        return state

    # The clock

    def seconds_spent(self) -> float:
        """Return the seconds spent so far, including this process."""
        now = time.perf_counter() if self._waiting_since is None else self._waiting_since
        return self.spent_before + now - deskside.STARTED

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager for a wait for the user, which does not count."""
        self._waiting_since = began = time.perf_counter()
        try:
            yield
        finally:
            self.spent_before -= time.perf_counter() - began
            self._waiting_since = None

    @property
    def hours(self) -> float:
        """The time budget in hours."""
        return float(self.data["hours"])

    def seconds_left(self) -> float:
        """Return the seconds left of the time budget; negative when it is exceeded."""
        return self.hours * 3600 - self.seconds_spent()

    def seconds_reserved(self) -> float:
        """Return the seconds reserved for the work after training."""
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

    def set_result(self, phase: str, result: dict[str, Any]) -> None:
        """Record the result of a phase."""
        self._set(self.data["results"], phase, result)

    @property
    def continued_in(self) -> Path | None:
        """The run in which the pipeline continues, in the same directory; None if it has not moved to another run."""
        name = self.data.get("continued_in")
        return None if name is None else self.run.path.parent / Path(name).name

    def continue_in(self, run: RunDirectory) -> None:
        """Record that the pipeline continues in another run of the same directory.

        Only its name is stored, so the directory can be moved.
        """
        self._set(self.data, "continued_in", run.path.name)

    def set_gpus(self, gpus: int) -> None:
        """Set the number of processes that train."""
        self._set(self.data["options"], "gpus", gpus)

    def drop_target(self) -> None:
        """Remove the target loss, so that a resumed pipeline does not stop for it again."""
        self._set(self.data["options"], "target_loss", None)

    def _set(self, where: dict[str, Any], key: str, value: Any) -> None:
        with self._lock:  # the saving thread copies the data
            where[key] = value
        self.save()

    def save(self) -> None:
        """Write go.json. Raises RunError if that fails."""
        with self._lock:
            self.data["spent_seconds"] = round(self.seconds_spent(), 3)
            self.run.write_json(PIPELINE_FILE, copy.deepcopy(self.data))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the pipeline's lock and record the spent time periodically.

        Raises UsageError if another process runs the pipeline.
        """
        with self.run.lock(".go.lock", "is running this pipeline"):
            ended = threading.Event()
            saving = threading.Thread(target=self._save_periodically, args=(ended,), daemon=True)
            saving.start()
            try:
                yield
            finally:
                ended.set()
                saving.join()
                self.save()

    def _save_periodically(self, ended: threading.Event) -> None:
        while not ended.wait(SAVE_SECONDS):
            # A failed write only loses some seconds. If the disk is full, the pipeline fails at its next own write.
            with contextlib.suppress(RunError):
                self.save()
