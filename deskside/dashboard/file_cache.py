"""Cache of what was read from disk, keyed by each file's name, time and size, so that only changed files are read.

Streamlit's own `cache_data` copies a cached value at every use, about a millisecond each: a second per click with
1,000 runs. The records in this cache are immutable, so they are shared instead.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from deskside.dashboard import studies
from deskside.dashboard.scan import Found, FoundRun, Stamp, scan, stamp
from deskside.dashboard.studies import Study
from deskside.run import record
from deskside.run.record import MetricsLog, RunRecord
from deskside.study.liveness import held_locks, is_live, mark_interrupted
from deskside.study.results import Results

SCAN_SECONDS = 4  # a directory listing is valid for this long
MAX_RUNS, MAX_LARGE = 20_000, 64
STUDY_FILES = ("results.json", "study.json")
RUN_FILES = ("run.json", "summary.json", "plan.json", "environment.json")
Value = TypeVar("Value")


class Cache:
    """The `size` most recently read values, each valid while its key is unchanged.

    Thread-safe: values are read under `lock`, so concurrent requests read a value once. Caches whose values are
    computed from one another share a lock.
    """

    def __init__(self, size: int, lock: threading.RLock):
        self._size = size
        self._lock = lock
        self._values: dict[tuple[str, str], tuple[object, Any]] = {}

    def get(self, kind: str, name: str, key: object, read: Callable[[], Value]) -> Value:
        """Return the value of this kind and name, which is read if it is not cached or its key has changed."""
        with self._lock:
            known = self._values.get((kind, name))
            if known is not None and known[0] == key:
                cached: Value = known[1]
                return cached
            value = read()
            self._values.pop((kind, name), None)
            self._values[kind, name] = (key, value)
            while len(self._values) > self._size:
                self._values.pop(next(iter(self._values)))
        return value


# One cache for many small values and one for large ones, shared by all browser sessions.
_lock = threading.RLock()
_small, _large = Cache(MAX_RUNS, _lock), Cache(MAX_LARGE, _lock)
_listed: dict[str, tuple[float, Found]] = {}  # directory -> (time, contents)


def preload(root: Path) -> None:
    """Read what the first page shows, before the first browser asks for it."""
    here = found(str(root))
    for path in here.studies:
        study(path)
    runs(here.own_runs, live_runs(here.own_runs), root)


def found(root: str) -> Found:
    """Return the studies and runs below a directory, at most SCAN_SECONDS old."""
    with _lock:
        known = _listed.get(root)
        if known is None or time.monotonic() - known[0] >= SCAN_SECONDS:
            known = _listed[root] = (time.monotonic(), scan(Path(root)))
        return known[1]


def live_runs(among: tuple[FoundRun, ...]) -> frozenset[Path]:
    """Return the directories of the runs that are training now."""
    now, locks = time.time(), held_locks()
    return frozenset(run.path for run in among if is_live(run.path, now, locks))


def study(path: Path) -> Study | None:
    """Return a study as it is now, or None if the directory holds something else."""
    read = _large.get("study", str(path), stamp(path, *STUDY_FILES), lambda: _study(path))
    if read is None or read.results is None:
        return read
    return replace(read, results=mark_interrupted(read.results, path))


def readable(found: Found) -> dict[Path, Results]:
    """Return the studies whose results can be read, by their directories."""
    read = {path: study(path) for path in found.studies}
    return {
        path: known.results for path, known in read.items() if known is not None and known.results is not None
    }


def _study(path: Path) -> Study | None:
    read = studies.read_study(path)
    if read is None or read.results is None:
        return read
    arms = read.results.arms
    if not any(arm.estimates for arm in arms) and any(arm.finished() for arm in arms):
        from deskside.study.stats.compare import compare  # rare: the runner was killed before it compared

        return Study(read.path, compare(read.results), "")
    return read


def brief(path: Path) -> RunRecord:
    """Return the small files of a run."""
    return _small.get("brief", str(path), stamp(path, *RUN_FILES), lambda: record.read_brief(path))


def plan(path: Path) -> dict[str, Any]:
    """Return a run's plan.json."""
    return _small.get(
        "plan", str(path), stamp(path, "plan.json"), lambda: record.read_object(path / "plan.json")[0]
    )


def newest_metrics(path: Path) -> MetricsLog:
    """Return a run's newest rows of metrics.jsonl."""
    key = stamp(path, "metrics.jsonl")
    return _large.get("metrics", str(path), key, lambda: record.read_metrics(path, record.TAIL_BYTES))


def curve(path: Path) -> tuple[list[dict[str, float | None]], list[str]]:
    """Return a run's full curve and what is missing of it. Raises UsageError if there is no run."""
    return _large.get("curve", str(path), stamp(path, "metrics.jsonl"), lambda: studies.read_curve(path))


def runs(own: tuple[FoundRun, ...], live: frozenset[Path], root: Path) -> Results:
    """Return the runs that belong to no study, in the shape of a study."""
    key: tuple[tuple[Path, Stamp], ...] = tuple((run.path, stamp(run.path, *RUN_FILES)) for run in own)
    return _large.get(
        "runs",
        str(root),
        (key, live),
        lambda: studies.runs_as_results((brief(run.path) for run in own), live, root),
    )


def selected(name: str, key: object, select: Callable[[], Results]) -> Results:
    """Return the part of the study `name` that the filters leave, which is computed if its key has changed."""
    return _large.get("selected", name, key, select)
