"""Detection of live runs and studies from their directories, without disturbing them.

results.json lists a trial as running until its end is recorded. After a kill, or in a copy of the directory, that
never happens, so readers check here for signs of life.
"""

import time
from dataclasses import replace
from pathlib import Path

from deskside.study.results import INTERRUPTED, Results

RECENT_SECONDS = 120.0


def held_locks() -> frozenset[int]:
    """Return the inodes of all locked files (/proc/locks), or an empty set where it is not available.

    The lock itself is never tried: a training run that starts at that moment would find it taken.
    """
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError:
        return frozenset()
    places = (word for line in lines for word in line.split() if word.count(":") == 2)
    return frozenset(int(inode) for inode in (place.rsplit(":", 1)[1] for place in places) if inode.isdigit())


def is_live(path: Path, now: float, locks: frozenset[int]) -> bool:
    """Return whether a run is live: its lock is held, or it has no summary and wrote in the last two minutes."""
    if _is_held(path, locks):
        return True
    if (path / "summary.json").exists():
        return False
    return now - last_written(path) < RECENT_SECONDS


def _is_held(path: Path, locks: frozenset[int]) -> bool:
    try:
        return (path / ".lock").stat().st_ino in locks
    except OSError:
        return False  # no lock file: older, copied from elsewhere, or not begun


def last_written(path: Path) -> float:
    """Return the time of the run's last write in seconds since 1970, or 0."""
    times = [0.0]
    for name in ("metrics.jsonl", "events.log", "plan.json", "run.json"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def as_it_is(results: Results, folder: Path, locks: frozenset[int] | None = None) -> Results:
    """Return the study with status "interrupted" for every running trial without a sign of life.

    If the study's own lock is held, all its trials count as live, because a new trial needs a while to write its
    first files. locks: from `held_locks`, read here by default.
    """
    if not any(trial.status == "running" for arm in results.arms for trial in arm.trials):
        return results
    locks = held_locks() if locks is None else locks
    if _is_held(folder, locks):
        return results
    now = time.time()
    arms = [
        replace(
            arm,
            trials=[
                replace(trial, status=INTERRUPTED)
                if trial.status == "running" and not is_live(folder / trial.run, now, locks)
                else trial
                for trial in arm.trials
            ],
        )
        for arm in results.arms
    ]
    return replace(results, arms=arms)
