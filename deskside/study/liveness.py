"""Detection of runs that are still training, from their directories and without disturbing them.

results.json lists a trial as running until its end is recorded, which does not happen if the study was killed or the
directory is a copy. So readers of results.json check here whether a running trial is alive.
"""

import time
from dataclasses import replace
from pathlib import Path

from deskside.run.directory import place_of_locks
from deskside.study.results import INTERRUPTED, Results

RECENT_SECONDS = 120.0


def held_locks() -> frozenset[int]:
    """Return the inodes of all locked files (/proc/locks), or an empty set where it is not available.

    Trying to take a run's lock instead would make a training run fail that starts at the same moment.
    """
    try:
        lines = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError:
        return frozenset()
    inodes = set()
    for line in lines:
        for word in line.split():
            _, _, inode = word.rpartition(":")
            if word.count(":") == 2 and inode.isdigit():  # MAJOR-DEVICE:MINOR-DEVICE:INODE
                inodes.add(int(inode))
    return frozenset(inodes)


def is_live(path: Path, now: float, locks: frozenset[int]) -> bool:
    """Return True if a run is live: its lock is held, or it has no summary and wrote in the last two minutes.

    The last writes count only where the lock cannot tell: on another machine, or before a new run has taken it.

    Args:
        now: Time in seconds since 1970.
        locks: Result of `held_locks`.
    """
    if is_held(path, locks):
        return True
    if (path / "summary.json").exists() or _was_released(path):
        return False
    return now - last_written(path) < RECENT_SECONDS


def is_held(path: Path, locks: frozenset[int]) -> bool:
    """Return True if the lock of a run, its pipeline or a study is held. locks: result of `held_locks`."""
    for name in (".lock", ".go.lock"):
        try:
            if (path / name).stat().st_ino in locks:
                return True
        except OSError:
            continue  # no lock file: the run is old, or a copy, or has not begun
    return False


def _was_released(path: Path) -> bool:
    """Return True if a lock that is not held was taken here, so that it would be seen if it were held."""
    try:
        place = (path / ".lock").read_text("utf-8", errors="replace")
    except OSError:
        return False
    return place != "" and place == place_of_locks()


def last_written(path: Path) -> float:
    """Return the time of the run's last write in seconds since 1970, or 0 if it wrote nothing."""
    times = [0.0]
    for name in ("metrics.jsonl", "events.log", "plan.json", "run.json"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def is_running(folder: Path, run: Path, locks: frozenset[int]) -> bool:
    """Return True if a trial that is listed as running can be running.

    If the lock of the study's folder is held, all its trials count as live, because a new trial needs a while to write
    its first files.

    Args:
        run: Directory of the trial's run.
        locks: Result of `held_locks`.
    """
    return is_held(folder, locks) or is_live(run, time.time(), locks)


def mark_interrupted(results: Results, folder: Path, locks: frozenset[int] | None = None) -> Results:
    """Return the study with status "interrupted" for every trial that is listed as running but does not run.

    Args:
        locks: Result of `held_locks`, which is called by default.
    """
    if not any(trial.status == "running" for arm in results.arms for trial in arm.trials):
        return results
    locks = held_locks() if locks is None else locks
    arms = []
    for arm in results.arms:
        trials = []
        for trial in arm.trials:
            if trial.status == "running" and not is_running(folder, folder / trial.run, locks):
                trial = replace(trial, status=INTERRUPTED)
            trials.append(trial)
        arms.append(replace(arm, trials=trials))
    return replace(results, arms=arms)
