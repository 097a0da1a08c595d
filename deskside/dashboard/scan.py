"""Search for studies and runs below a directory. No file is opened, so that listing stays fast with 1,000 runs.

A directory is recognized by the names in it:

    study   results.json or study.json; its runs are in runs/ below it
    run     run.json, metrics.jsonl or summary.json; nothing below it is searched

Links are followed, and each directory is visited once. A directory that cannot be listed is a problem, not an error.
"""

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

MAX_DEPTH = 5  # studies/NAME/runs/ARM is four levels below the root
MAX_DIRECTORIES = 20_000
STUDY = frozenset(("results.json", "study.json"))
RUN = frozenset(("run.json", "metrics.jsonl", "summary.json"))
SKIPPED = frozenset(("checkpoints", "model", "plots", "__pycache__", "node_modules", "site-packages"))
# (modified in nanoseconds, bytes) of some files; None for a missing file
Stamp = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class FoundRun:
    """A run's directory, and the study that it belongs to, if any."""

    path: Path
    study: Path | None


@dataclass(frozen=True)
class Found:
    """Studies and runs below a directory. `problems` are (path, reason) of directories that could not be listed."""

    studies: tuple[Path, ...]
    runs: tuple[FoundRun, ...]
    problems: tuple[tuple[Path, str], ...]

    @property
    def own_runs(self) -> tuple[FoundRun, ...]:
        """The runs that belong to no study."""
        return tuple(run for run in self.runs if run.study is None)


def scan(root: Path, depth: int = MAX_DEPTH) -> Found:
    """Return the studies and runs in `root` and up to `depth` levels below it, ordered by path."""
    studies: list[Path] = []
    runs: list[FoundRun] = []
    problems: list[tuple[Path, str]] = []
    visited: set[tuple[int, int]] = set()
    waiting: deque[tuple[Path, int, Path | None]] = deque([(root, 0, None)])
    while waiting:
        path, level, study = waiting.popleft()
        if len(visited) >= MAX_DIRECTORIES:
            problems.append(
                (
                    path,
                    f"more than {MAX_DIRECTORIES:,} directories: the rest was not searched; give a smaller DIR",
                )
            )
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
                if entry.is_file():  # reading a named pipe would block
                    names.add(entry.name)
            elif not entry.name.startswith(".") and entry.name not in SKIPPED and entry.is_dir():
                folders.append(Path(entry.path))
    return names, folders


def stamp(folder: Path, *names: str) -> Stamp:
    """Return a key that changes when one of these files does."""
    return tuple(_stamp(folder / name) for name in names)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
