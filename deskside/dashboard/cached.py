"""What was read stays in memory under the file's name, time and size, so that only what changed is read again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from deskside.dashboard import reading
from deskside.dashboard.reading import Brief, Study
from deskside.dashboard.scan import Found, FoundRun, Stamp, scan, stamp
from deskside.dashboard.selection import Picked, Selection, select
from deskside.study.compare import compare
from deskside.study.results import Results

SECONDS = 4  # a directory is listed anew after so long
STUDY_FILES = ("results.json", "study.json")
RUN_FILES = ("run.json", "summary.json", "plan.json", "metrics.jsonl", "environment.json")


@dataclass(frozen=True)
class Context:
    """What every tab gets. selection: None where there is neither a study that can be read nor a run."""

    root: Path
    found: Found
    selection: Selection | None


@st.cache_data(ttl=SECONDS, max_entries=8, show_spinner="looking for studies and runs")
def found(root: str) -> Found:
    """What lies below a directory, at most a few seconds old."""
    return scan(Path(root))


@st.cache_data(max_entries=64, show_spinner=False)
def _study(path: str, key: Stamp) -> Study | None:
    study = reading.read_study(Path(path))
    if study is None or study.results is None:
        return study
    results = study.results
    if not any(arm.estimates for arm in results.arms) and any(arm.finished() for arm in results.arms):
        study = Study(study.path, compare(results), "")  # a runner that was killed before it compared
    return study


def study(path: Path) -> Study | None:
    """A study; None for a directory that holds something else."""
    return _study(str(path), stamp(path, *STUDY_FILES))


@st.cache_data(max_entries=4096, show_spinner=False)
def _brief(path: str, key: Stamp) -> Brief:
    return reading.read_brief(Path(path))


def brief(path: Path) -> Brief:
    """A run in short."""
    return _brief(str(path), stamp(path, *RUN_FILES))


@st.cache_data(max_entries=64, show_spinner=False)
def _curve(path: str, key: Stamp) -> list[dict[str, float | None]]:
    return reading.read_curve(Path(path))


def curve(path: Path) -> list[dict[str, float | None]]:
    """A run's whole curve."""
    return _curve(str(path), stamp(path, "metrics.jsonl"))


@st.cache_data(max_entries=4, show_spinner="reading runs")
def _runs(paths: tuple[str, ...], key: tuple[Stamp, ...], live: frozenset[str], root: str) -> Results:
    briefs = [brief(Path(path)) for path in paths]
    return reading.as_results(briefs, frozenset(Path(path) for path in live), Path(root))


def runs(own: tuple[FoundRun, ...], live: frozenset[Path], root: Path) -> Results:
    """The runs that are no part of a study, in the shape of one."""
    paths = tuple(str(run.path) for run in own)
    key = tuple(stamp(run.path, *RUN_FILES) for run in own)
    return _runs(paths, key, frozenset(str(path) for path in live), str(root))


@st.cache_data(max_entries=32, show_spinner="comparing")
def _selected(whole: Results, picked: tuple[Any, ...]) -> Results:
    groups, levels, statuses, seeds, words = picked
    return select(whole, Picked(groups, dict(levels), statuses, seeds, words))


def selected(whole: Results, picked: Picked) -> Results:
    """The part of a study that the filters leave."""
    if picked.seeds is None:
        return select(whole, picked)
    levels = tuple(sorted(picked.levels.items()))
    return _selected(whole, (picked.groups, levels, picked.statuses, picked.seeds, picked.words))
