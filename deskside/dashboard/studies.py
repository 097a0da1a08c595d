"""Reads studies and the curves of runs."""

from dataclasses import dataclass
from pathlib import Path

from deskside.run.record import number, read_run
from deskside.study import results as study_results
from deskside.study.results import Results
from deskside.utils.errors import RunError, UsageError

HEAD_BYTES = 2**16  # of results.json that are searched for the schema version


@dataclass(frozen=True)
class Study:
    """A study's directory with its `results`, or None and the `problem` why they could not be read."""

    path: Path
    results: Results | None
    problem: str


def read_study(path: Path) -> Study | None:
    """Read a study. Returns None for a directory whose results.json belongs to another program."""
    try:
        return Study(path, study_results.read(path), "")
    except (RunError, UsageError) as error:
        if not (path / study_results.PLAN).exists() and not _claims_to_be_study(path / study_results.RESULTS):
            return None
        if not (path / study_results.RESULTS).exists():
            return Study(path, None, f"no trial has started yet (there is no {study_results.RESULTS})")
        return Study(path, None, str(error).removeprefix(f"{path / study_results.RESULTS}: "))


def _claims_to_be_study(path: Path) -> bool:
    """Return True if the beginning of a file looks like a study's results. A damaged file cannot be parsed."""
    try:
        with path.open("rb") as file:
            return b'"schema_version"' in file.read(HEAD_BYTES)
    except OSError:
        return True  # unreadable, so it is reported as a problem


def read_curve(path: Path) -> tuple[list[dict[str, float | None]], list[str]]:
    """Return a run's full curve in the format of `Trial.curve`, and sentences about missing parts of it.

    Raises UsageError if there is no run.
    """
    record = read_run(path)
    missing = [sentence for sentence in record.problems if "metrics.jsonl" in sentence]
    keys = ("step", "tokens", "seconds", "loss", "val_bpb", "load_imbalance")
    return [{key: number(row.get(key)) for key in keys} for row in record.metrics], missing
