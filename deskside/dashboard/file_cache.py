"""Caches values read from disk. A value is read again if the modification time or size of its files has changed.

Streamlit's `cache_data` copies a value at every use, which takes about a millisecond: a second per click with 1,000
runs. The values in this cache are shared, so they must not be changed.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from deskside.dashboard import run_table, searches, studies
from deskside.dashboard.run_table import TableRow
from deskside.dashboard.scan import FoundRun, ScanResult, name_below, scan, stamp
from deskside.dashboard.searches import Search
from deskside.dashboard.studies import Study
from deskside.run import record
from deskside.run.record import MetricsLog, RunRecord
from deskside.study.liveness import held_locks, is_live, mark_interrupted
from deskside.study.results import PLAN, RESULTS, Results

REFRESH_SECONDS = 2  # between two looks at the files of runs and studies that are not finished
SCAN_SECONDS = 4  # a scan result is used for this long
MAX_SMALL, MAX_LARGE = 20_000, 64
STUDY_FILES = (RESULTS, PLAN)
SEARCH_FILES = ("search.json", "result.json")
RUN_JSON_FILES = ("run.json", "summary.json", "plan.json", "environment.json")
Value = TypeVar("Value")


class Cache:
    """A cache of the `size` most recently read values, each valid while its key is unchanged.

    Thread-safe: values are read while holding `lock`, so concurrent requests read a value only once. Caches whose
    values are computed from one another must share a (reentrant) lock.
    """

    def __init__(self, size: int, lock: threading.RLock):
        self._size = size
        self._lock = lock
        self._values: dict[tuple[str, str], tuple[object, Any]] = {}

    def get(self, kind: str, name: str, key: object, read: Callable[[], Value]) -> Value:
        """Return the value of this kind and name. Calls `read` if it is not cached or its key has changed."""
        with self._lock:
            cached = self._values.get((kind, name))
            if cached is not None and cached[0] == key:
                cached_value: Value = cached[1]
                return cached_value
            value = read()
            self._values.pop((kind, name), None)
            self._values[kind, name] = (key, value)
            while len(self._values) > self._size:
                self._values.pop(next(iter(self._values)))
        return value

    def newest(self, kind: str, name: str) -> Any:
        """Return the value of this kind and name that was read last, whatever its key; None if there is none."""
        with self._lock:
            return self._values.get((kind, name), (None, None))[1]


# One cache for many small values and one for large ones, shared by all browser sessions.
_lock = threading.RLock()
_small_values, _large_values = Cache(MAX_SMALL, _lock), Cache(MAX_LARGE, _lock)
_scan_results: dict[str, tuple[float, ScanResult]] = {}  # directory -> (time, contents)


def preload(root: Path) -> None:
    """Fill the cache with what the first page needs, before a browser requests it."""
    rows(scan_result(str(root)), root)


def scan_result(root: str) -> ScanResult:
    """Return the studies and runs below a directory, from a scan that is at most SCAN_SECONDS old."""
    with _lock:
        cached = _scan_results.get(root)
        if cached is None or time.monotonic() - cached[0] >= SCAN_SECONDS:
            cached = _scan_results[root] = (time.monotonic(), scan(Path(root)))
        return cached[1]


def live_runs(runs: tuple[FoundRun, ...]) -> frozenset[Path]:
    """Return the directories of the runs that are training now."""
    now, locks = time.time(), held_locks()
    return frozenset(run.path for run in runs if is_live(run.path, now, locks))


def study(path: Path) -> Study | None:
    """Return a study with its current results, or None if the directory does not hold a study."""
    read = _large_values.get("study", str(path), stamp(path, *STUDY_FILES), lambda: _study(path))
    if read is None or read.results is None:
        return read
    return replace(read, results=mark_interrupted(read.results, path))


def search(path: Path) -> Search:
    """Return a search with its current status and time."""
    read = _large_values.get(
        "search", str(path), stamp(path, *SEARCH_FILES), lambda: searches.read_search(path)
    )
    return searches.with_status(read)


def readable_studies(result: ScanResult) -> dict[Path, Results]:
    """Return the results of each study that can be read, by directory."""
    studies_read = {path: study(path) for path in result.studies}
    return {
        path: read.results
        for path, read in studies_read.items()
        if read is not None and read.results is not None
    }


def _study(path: Path) -> Study | None:
    """Read a study. Compute its comparisons if the runner was killed before it did."""
    read = studies.read_study(path)
    if read is None or read.results is None:
        return read
    arms = read.results.arms
    if not any(arm.estimates for arm in arms) and any(arm.finished() for arm in arms):
        from deskside.study.stats.compare import compare  # imports scipy, which takes half a second

        return Study(read.path, compare(read.results), "")
    return read


def brief(path: Path) -> RunRecord:
    """Return a run's record without its metrics, from its small JSON files."""
    return _small_values.get(
        "brief", str(path), stamp(path, *RUN_JSON_FILES), lambda: record.read_brief(path)
    )


def row(path: Path, live: bool, root: Path, kind: str) -> TableRow:
    """Return a run's row in the table of runs."""

    def read() -> TableRow:
        log = record.sample_metrics(path, run_table.SPARKLINE_POINTS)
        if not brief(path).finished:  # evaluations are rare, so the last rows may have none
            evaluated = [row for row in newest_metrics(path).rows if "val_bpb" in row]
            log = replace(log, rows=sorted([*evaluated, *log.rows], key=lambda row: row["step"]))
        lowest = record.lowest_metric(path, "val_bpb")
        return run_table.run_row(brief(path), log, lowest, live, name_below(path, root), kind)

    key = (stamp(path, "metrics.jsonl", *RUN_JSON_FILES), live)
    return _small_values.get("row", str(path), key, read)


def rows(result: ScanResult, root: Path) -> list[TableRow]:
    """Return the rows of all searches, studies, runs and trials that can be read, the newest first.

    The two studies of a search have no separate rows.
    """
    live = live_runs(result.runs)
    found = [
        row(run.path, run.path in live, root, run_table.TRIAL if run.study else run_table.RUN)
        for run in result.runs
    ]
    found += [
        run_table.study_row(results, name_below(path, root))
        for path, results in readable_studies(result).items()
        if path in result.standalone_studies
    ]
    found += [
        run_table.search_row(read, name_below(read.path, root))
        for read in map(search, result.searches)
        if read.outcome is not None
    ]
    return sorted(found, key=lambda row: row.created, reverse=True)


def plan(path: Path) -> dict[str, Any]:
    """Return a run's plan.json; {} if it is missing or damaged."""
    return _small_values.get(
        "plan", str(path), stamp(path, "plan.json"), lambda: record.read_object(path / "plan.json")[0]
    )


def newest_metrics(path: Path) -> MetricsLog:
    """Return the newest rows of a run's metrics.jsonl."""
    key = stamp(path, "metrics.jsonl")
    return _large_values.get("metrics", str(path), key, lambda: record.read_metrics(path, record.TAIL_BYTES))


def metrics(path: Path) -> MetricsLog:
    """Return all rows of a run's metrics.jsonl. Of a file that has grown, only the new part is read."""
    key = stamp(path, "metrics.jsonl")

    def read() -> MetricsLog:
        known = _large_values.newest("all metrics", str(path))
        return record.read_new_metrics(path, known) if known is not None else record.read_metrics(path)

    return _large_values.get("all metrics", str(path), key, read)


def events(path: Path) -> list[str]:
    """Return the lines of a run's events.log; none if it cannot be read."""

    def read() -> list[str]:
        try:
            lines = (path / "events.log").read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()]

    return _large_values.get("events", str(path), stamp(path, "events.log"), read)


def curve(path: Path) -> tuple[list[dict[str, float | None]], list[str]]:
    """Return a run's full curve and sentences about missing parts of it. Raises UsageError if there is no run."""
    return _large_values.get(
        "curve", str(path), stamp(path, "metrics.jsonl"), lambda: studies.read_curve(path)
    )


def filtered(name: str, key: object, select: Callable[[], Results]) -> Results:
    """Return the filtered results of the study `name`. Calls `select` if they are not cached or `key` has changed."""
    return _large_values.get("selected", name, key, select)
