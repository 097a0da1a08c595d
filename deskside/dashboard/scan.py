"""Finds the searches, studies and runs below a directory. No file is opened, so it is fast even with 1,000 runs.

A directory is recognized by the files in it:

    search  search.json; it has two studies, trials/ and confirm/
    study   results.json or study.json; the runs below it are its own
    run     run.json, metrics.jsonl or summary.json; its subdirectories are not searched

Links are followed, and each directory is visited once. A directory that cannot be listed is recorded as a problem.
"""

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from deskside.study.results import PLAN, RESULTS

MAX_DEPTH = 5  # studies/NAME/runs/ARM is four levels below the root
MAX_DIRECTORIES = 20_000
SEARCH_MARKERS = frozenset(("search.json",))
STUDY_MARKERS = frozenset((PLAN, RESULTS))
RUN_MARKERS = frozenset(("run.json", "metrics.jsonl", "summary.json"))
SKIPPED_DIRECTORIES = frozenset(
    # docs: a checkout of deskside has the runs of its log there
    ("checkpoints", "model", "plots", "docs", "__pycache__", "node_modules", "site-packages")
)
# (modification time in nanoseconds, size in bytes) of several files; None for a missing file
Stamp = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class FoundRun:
    """The directory of a run, and that of its study, if any."""

    path: Path
    study: Path | None


@dataclass(frozen=True)
class ScanResult:
    """Directories of studies, runs and searches. `problems` has (path, reason) of each that could not be listed."""

    studies: tuple[Path, ...]
    runs: tuple[FoundRun, ...]
    problems: tuple[tuple[Path, str], ...]
    searches: tuple[Path, ...] = ()

    @property
    def standalone_runs(self) -> tuple[FoundRun, ...]:
        """The runs that belong to no study."""
        return tuple(run for run in self.runs if run.study is None)

    @property
    def standalone_studies(self) -> tuple[Path, ...]:
        """The studies that belong to no search."""
        return tuple(study for study in self.studies if study.parent not in self.searches)


def scan(root: Path, max_depth: int = MAX_DEPTH) -> ScanResult:
    """Return the searches, studies and runs in `root` and up to `max_depth` levels below it, ordered by path."""
    searches: list[Path] = []
    studies: list[Path] = []
    runs: list[FoundRun] = []
    problems: list[tuple[Path, str]] = []
    visited: set[tuple[int, int]] = set()
    queue: deque[tuple[Path, int, Path | None]] = deque([(root, 0, None)])
    while queue:
        path, depth, study = queue.popleft()
        if len(visited) >= MAX_DIRECTORIES:
            problems.append(
                (
                    path,
                    f"more than {MAX_DIRECTORIES:,} directories: the rest was not searched; choose a DIR with fewer",
                )
            )
            break
        try:
            file_stat = path.stat()
            if (file_stat.st_dev, file_stat.st_ino) in visited:
                continue
            visited.add((file_stat.st_dev, file_stat.st_ino))
            names, folders = _list_directory(path)
        except OSError as error:
            problems.append((path, f"cannot be listed: {error.strerror}"))
            continue
        if names & SEARCH_MARKERS:
            searches.append(path)
        elif names & STUDY_MARKERS:
            studies.append(path)
            study = path
        elif names & RUN_MARKERS:
            runs.append(FoundRun(path, study))
            continue
        if depth < max_depth:
            queue.extend((folder, depth + 1, study) for folder in folders)
    return ScanResult(
        tuple(sorted(studies)),
        tuple(sorted(runs, key=lambda run: run.path)),
        tuple(problems),
        tuple(sorted(searches)),
    )


def _list_directory(path: Path) -> tuple[set[str], list[Path]]:
    names: set[str] = set()
    folders: list[Path] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name in SEARCH_MARKERS | STUDY_MARKERS | RUN_MARKERS:
                if entry.is_file():  # reading a named pipe would block
                    names.add(entry.name)
            elif not entry.name.startswith(".") and entry.name not in SKIPPED_DIRECTORIES and entry.is_dir():
                folders.append(Path(entry.path))
    return names, folders


def name_below(path: Path, root: Path) -> str:
    """Return the path of a run or study below the root: its name on the pages and in their addresses."""
    return str(path.relative_to(root)) if path != root and path.is_relative_to(root) else path.resolve().name


def stamp(folder: Path, *names: str) -> Stamp:
    """Return a cache key that changes when one of these files is changed, created or deleted."""
    return tuple(_stamp(folder / name) for name in names)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        file_stat = path.stat()
    except OSError:
        return None
    return file_stat.st_mtime_ns, file_stat.st_size
