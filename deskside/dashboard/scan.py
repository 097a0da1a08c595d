"""Which studies and runs there are below a directory. Nothing is opened here: listing must stay fast with 1,000 runs.

A directory is known by the names of what it holds:

    study   results.json or study.json; its runs are in runs/ below it
    run     run.json, metrics.jsonl or summary.json; nothing below it is looked at

Links are followed, each directory is visited once. What cannot be listed is told, not raised.
"""

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

DEPTH = 5  # studies/NAME/runs/ARM is four below where a person stands
MOST = 20_000  # directories that are listed before the search is given up
STUDY = frozenset(("results.json", "study.json"))
RUN = frozenset(("run.json", "metrics.jsonl", "summary.json"))
PASSED_OVER = frozenset(("checkpoints", "model", "plots", "__pycache__", "node_modules", "site-packages"))
Stamp = tuple[
    tuple[int, int] | None, ...
]  # (modified in nanoseconds, bytes) of some files; None for one not there


@dataclass(frozen=True)
class FoundRun:
    """A run's directory. study: the study that it belongs to, None for a run of its own."""

    path: Path
    study: Path | None


@dataclass(frozen=True)
class Found:
    """What lies below a directory. problems: (path, reason) of what could not be listed."""

    studies: tuple[Path, ...]
    runs: tuple[FoundRun, ...]
    problems: tuple[tuple[Path, str], ...]

    @property
    def own_runs(self) -> tuple[FoundRun, ...]:
        """The runs that are no part of a study."""
        return tuple(run for run in self.runs if run.study is None)


def scan(root: Path, depth: int = DEPTH) -> Found:
    """Studies and runs in `root` and up to `depth` levels below it, in the order of their paths."""
    studies: list[Path] = []
    runs: list[FoundRun] = []
    problems: list[tuple[Path, str]] = []
    visited: set[tuple[int, int]] = set()
    waiting: deque[tuple[Path, int, Path | None]] = deque([(root, 0, None)])
    while waiting:
        path, level, study = waiting.popleft()
        if len(visited) >= MOST:
            problems.append((path, f"more than {MOST:,} directories: the rest was not searched; give a DIR"))
            break
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            names, folders = _list(path)
        except OSError as error:
            problems.append((path, f"cannot be listed: {error.strerror}"))
            continue
        if names & STUDY:
            studies.append(path)
            study = path
        elif names & RUN:
            runs.append(FoundRun(path, study))
            continue
        if level < depth:
            waiting.extend((folder, level + 1, study) for folder in folders)
    return Found(tuple(sorted(studies)), tuple(sorted(runs, key=lambda run: run.path)), tuple(problems))


def _list(path: Path) -> tuple[set[str], list[Path]]:
    names: set[str] = set()
    folders: list[Path] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name in STUDY or entry.name in RUN:
                if entry.is_file():  # a pipe of that name would hold up whoever reads it
                    names.add(entry.name)
            elif not entry.name.startswith(".") and entry.name not in PASSED_OVER and entry.is_dir():
                folders.append(Path(entry.path))
    return names, folders


def stamp(folder: Path, *names: str) -> Stamp:
    """What changes when one of these files does: the key under which what was read of them is kept."""
    return tuple(_stamp(folder / name) for name in names)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
