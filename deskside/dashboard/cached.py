"""What was read stays in memory under the file's name, time and size, so that only what changed is read again.

Streamlit's own `cache_data` copies what it keeps at every use, about a millisecond each: with 1,000 runs that is a
second at every click. What is kept here are records that nobody changes, so they are handed out as they are.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from deskside.dashboard import reading
from deskside.dashboard.reading import Brief, Rows, Study
from deskside.dashboard.scan import Found, FoundRun, Stamp, scan, stamp
from deskside.dashboard.selection import Picked, Selection, select
from deskside.study.liveness import as_it_is, held_locks, is_live
from deskside.study.results import INTERRUPTED, Results

SECONDS = 4  # a directory is listed anew after so long
MOST_RUNS, MOST_LARGE = 20_000, 64
STUDY_FILES = ("results.json", "study.json")
RUN_FILES = ("run.json", "summary.json", "plan.json", "environment.json")
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Context:
    """What every tab gets. selection: None where there is neither a study that can be read nor a run."""

    root: Path
    found: Found
    selection: Selection | None


class Kept:
    """The last `most` things that were read, each valid while its key is the same.

    Safe among threads: one reads at a time, so that nothing is read twice at once. lock: one for all `Kept` whose
    things are read from one another.
    """

    def __init__(self, most: int, lock: threading.RLock):
        self._most = most
        self._lock = lock
        self._things: dict[tuple[str, str], tuple[Hashable, Any]] = {}

    def get(self, kind: str, name: str, key: Hashable, read: Callable[[], Thing]) -> Thing:
        """The thing of this kind and name, read when it is not there or its key has changed."""
        with self._lock:
            known = self._things.get((kind, name))
            if known is not None and known[0] == key:
                kept: Thing = known[1]
                return kept
            thing = read()
            self._things.pop((kind, name), None)
            self._things[kind, name] = (key, thing)
            while len(self._things) > self._most:
                self._things.pop(next(iter(self._things)))
        return thing


# Small things, of which there may be many, and large ones; shared by all who look at this page.
_lock = threading.RLock()
_small, _large = Kept(MOST_RUNS, _lock), Kept(MOST_LARGE, _lock)
_listed: dict[str, tuple[float, Found]] = {}  # directory -> when, what


def ahead(root: Path) -> None:
    """Read what the first page shows, before anybody has asked for it."""
    here = found(str(root))
    for path in here.studies:
        study(path)
    runs(here.own_runs, live_runs(here.own_runs), root)


def found(root: str) -> Found:
    """What lies below a directory, at most SECONDS old."""
    with _lock:
        known = _listed.get(root)
        if known is None or time.monotonic() - known[0] >= SECONDS:
            known = _listed[root] = (time.monotonic(), scan(Path(root)))
        return known[1]


def live_runs(among: tuple[FoundRun, ...]) -> frozenset[Path]:
    """The directories of the runs that are going on now."""
    now, locks = time.time(), held_locks()
    return frozenset(run.path for run in among if is_live(run.path, now, locks))


def study(path: Path) -> Study | None:
    """A study as it is now; None for a directory that holds something else."""
    read = _large.get("study", str(path), stamp(path, *STUDY_FILES), lambda: _study(path))
    if read is None or read.results is None:
        return read
    return replace(read, results=as_it_is(read.results, path))


def _study(path: Path) -> Study | None:
    read = reading.read_study(path)
    if read is None or read.results is None:
        return read
    arms = read.results.arms
    if not any(arm.estimates for arm in arms) and any(arm.finished() for arm in arms):
        from deskside.study.stats.compare import compare  # rarely: the runner was killed before it compared

        return Study(read.path, compare(read.results), "")
    return read


def brief(path: Path) -> Brief:
    """A run in short."""
    return _small.get("brief", str(path), stamp(path, *RUN_FILES), lambda: reading.read_brief(path))


def plan(path: Path) -> dict[str, Any]:
    """A run's plan.json."""
    return _small.get("plan", str(path), stamp(path, "plan.json"), lambda: reading.read_plan(path))


def rows(path: Path) -> Rows:
    """A run's newest steps."""
    return _large.get("rows", str(path), stamp(path, "metrics.jsonl"), lambda: reading.read_rows(path))


def curve(path: Path) -> tuple[list[dict[str, float | None]], list[str]]:
    """A run's whole curve, and what of it is missing. Raises UsageError where there is no run."""
    return _large.get("curve", str(path), stamp(path, "metrics.jsonl"), lambda: reading.read_curve(path))


def runs(own: tuple[FoundRun, ...], live: frozenset[Path], root: Path) -> Results:
    """The runs that are no part of a study, in the shape of one."""
    key: tuple[tuple[Path, Stamp], ...] = tuple((run.path, stamp(run.path, *RUN_FILES)) for run in own)
    return _large.get(
        "runs",
        str(root),
        (key, live),
        lambda: reading.as_results((brief(run.path) for run in own), live, root),
    )


def selected(name: str, whole: Results, picked: Picked) -> Results:
    """The part of a study that the filters leave. name: tells it from the others that are shown."""
    if picked.seeds is None:
        return select(whole, picked)
    levels = tuple(sorted(picked.levels.items()))
    gone = sum(trial.status == INTERRUPTED for arm in whole.arms for trial in arm.trials)
    key = (whole.updated, gone, picked.groups, levels, picked.statuses, picked.seeds, picked.words)
    return _large.get("selected", name, key, lambda: select(whole, picked))
