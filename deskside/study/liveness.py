"""Whether a run or a study is going on now, told from its directory without disturbing it.

results.json says "running" of a trial until somebody writes that it has ended. After a kill, or in a copy of the
directory, nobody does; so whoever shows a study asks here what of it shows life.
"""

import time
from dataclasses import replace
from pathlib import Path

from deskside.study.results import INTERRUPTED, Results

RECENT_SECONDS = 120.0


def held_locks() -> frozenset[int]:
    """Inodes of the files that some process holds a lock on, as Linux tells; empty where it does not.

    The lock itself is never tried: a training run that starts in that moment would find it taken.
    """
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError:
        return frozenset()
    places = (word for line in lines for word in line.split() if word.count(":") == 2)
    return frozenset(int(inode) for inode in (place.rsplit(":", 1)[1] for place in places) if inode.isdigit())


def is_live(path: Path, now: float, locks: frozenset[int]) -> bool:
    """Whether a run is going on: its lock is held, or it has no summary and was written to in the last two minutes."""
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
    """When a run last wrote one of its files, seconds since 1970; 0 where it has none."""
    times = [0.0]
    for name in ("metrics.jsonl", "events.log", "plan.json", "run.json"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def as_it_is(results: Results, folder: Path, locks: frozenset[int] | None = None) -> Results:
    """The study in `folder` with "interrupted" for every trial that is said to run and shows no life.

    A study that somebody runs (its own lock is held) is believed: a trial needs a while until its directory shows
    anything. locks: of `held_locks`, read here where they are not given.
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
