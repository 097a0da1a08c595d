"""go.json: how far the road is, and the clock of its hours.

The hours are wall-clock seconds in which some process was on the road, from the start of that process (before its
imports) to its end. A thread writes them down every `BEAT` seconds, so a kill loses no more than that; the time during
which nothing ran does not count. The file is replaced whole, and lies in the run's directory from the first moment, so
every phase can be taken up again.
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
from deskside.pipeline.pipeline_state import PHASES, SCHEMA, Phase, problem
from deskside.run.directory import RunDirectory
from deskside.utils.errors import RunError, UsageError

FILE = "go.json"
BEAT = 2.0  # seconds between two notes of the time
# What follows the training run's own end: samples, the report, leaving. On two CPU cores it took 3 to 5 s.
TAIL_SECONDS, TAIL_SHARE = 6.0, 0.005
MOST_CONTENTION = 4.0  # a load beyond it says little about a process of one thread


def contention() -> float:
    """Return how many processes share a CPU core of this machine (the load average of the last minute), at least 1."""
    return min(MOST_CONTENTION, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def tail_seconds(hours: float) -> float:
    """Return the seconds to keep for what follows the training run's own end: more on a busy machine."""
    return TAIL_SECONDS * contention() + TAIL_SHARE * hours * 3600


def damaged(path: Path, why: str) -> RunError:
    """The error for a road that cannot be gone on with."""
    return RunError(f"{path / FILE}: is damaged, or of another version ({why}); restore it, or begin again")


class Journal:
    """The state of one road. `state` is what go.json holds; `before` are the seconds of earlier processes."""

    def __init__(self, run: RunDirectory, state: dict[str, Any]):
        self.run, self.state = run, state
        self.before = float(state["spent_seconds"])
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
    ) -> "Journal":
        """A new road in an empty run directory. spent: seconds of these hours that are gone already; phase and
        results: where it begins when another road leads into it."""
        journal = cls(
            run,
            {
                "schema_version": SCHEMA,
                "hours": hours,
                "spent_seconds": spent,
                "phase": phase,
                "command": command,
                "options": options,
                "results": dict(results or {}),
                "continued_in": None,
            },
        )
        journal.note()
        return journal

    @classmethod
    def open(cls, path: Path) -> "Journal":
        """The road of an earlier process. Raises UsageError where there is none, RunError when it is damaged."""
        if not (path / FILE).is_file():
            begun = (entry for entry in path.rglob("*") if entry.is_file() and entry.name != f".{FILE}.tmp")
            if path.is_dir() and not any(begun):
                raise UsageError(
                    f"{path}: its road was stopped before it began; delete the folder, and begin again"
                )
            raise UsageError(
                f"{path}: holds no road to go on with (no {FILE}); roads are begun with: deskside go --hours H"
            )
        run = RunDirectory(path)
        state = run.read_json(FILE)
        why = problem(state, path)
        if why is not None:
            raise damaged(path, why)
        return cls(run, state)

    # The clock

    def seconds(self) -> float:
        """Spent so far, this process included."""
        return self.before + time.perf_counter() - deskside.STARTED

    @property
    def hours(self) -> float:
        """All of them."""
        return float(self.state["hours"])

    def left(self) -> float:
        """Seconds left of the hours; below zero when they are over."""
        return self.hours * 3600 - self.seconds()

    def tail(self) -> float:
        """Seconds to keep for what follows the training run's own end."""
        return tail_seconds(self.hours)

    # What is known

    @property
    def phase(self) -> Phase:
        phase: Phase = self.state["phase"]
        return phase

    def enter(self, phase: Phase) -> None:
        """The road has come to this phase."""
        self._set(self.state, "phase", phase)

    def result(self, phase: str) -> dict[str, Any]:
        """What came of a phase; empty when it has not ended."""
        return dict(self.state["results"].get(phase, {}))

    def keep(self, phase: str, result: dict[str, Any]) -> None:
        """Write down what came of a phase."""
        self._set(self.state["results"], phase, result)

    @property
    def continued_in(self) -> Path | None:
        """The run beside this one in which the road goes on."""
        name = self.state.get("continued_in")
        return None if name is None else self.run.path.parent / Path(name).name

    def continue_in(self, run: RunDirectory) -> None:
        """The road goes on in a run beside this one. Its name is kept, so that both can be moved together."""
        self._set(self.state, "continued_in", run.path.name)

    def drop_target(self) -> None:
        """The loss that was asked for stops nobody any more."""
        self._set(self.state["options"], "target_loss", None)

    def _set(self, where: dict[str, Any], key: str, value: Any) -> None:
        with self._lock:  # the beat copies the state in a thread of its own
            where[key] = value
        self.note()

    def note(self) -> None:
        """Write go.json as it is now. Raises RunError when the disk refuses."""
        with self._lock:
            self.state["spent_seconds"] = round(self.seconds(), 3)
            self.run.write_json(FILE, copy.deepcopy(self.state))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While entered, this process is the one on the road, and its time is written down again and again.

        Raises UsageError when another process is on it.
        """
        with self.run.alone(".go.lock", "is on this road"):
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
            # A full disk ends the road where it writes what it needs; a beat that is missed costs only its seconds.
            with contextlib.suppress(RunError):
                self.note()
