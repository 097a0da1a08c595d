"""Reads studies, and presents single runs in the form of a study."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deskside.dashboard.scan import name_below
from deskside.run.record import RunRecord, machine_name, mapping, number, read_run, text
from deskside.study import results as study_results
from deskside.study.results import INTERRUPTED, Arm, Estimate, Factor, Group, Results, Trial
from deskside.study.stats.metrics import BY_KEY
from deskside.utils.errors import RunError, UsageError

RUNS_GROUP = "runs"  # name of the group that holds single runs
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
        if not (path / "study.json").exists() and not _claims_to_be_study(path / "results.json"):
            return None
        if not (path / "results.json").exists():
            return Study(path, None, "no trial has started yet (there is no results.json)")
        return Study(path, None, str(error).removeprefix(f"{path / 'results.json'}: "))


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


def summary_metrics(record: RunRecord) -> dict[str, float]:
    """Return the study metrics (stats/metrics.py) in a run's summary, by key."""
    known = {key: number(record.summary.get(key)) for key in BY_KEY}
    return {key: value for key, value in known.items() if value is not None}


def runs_as_results(records: Iterable[RunRecord], live: frozenset[Path], root: Path) -> Results:
    """Return single runs as a study in which each run is an arm with one trial and is its own baseline."""
    arms = [_arm(record, live, root) for record in records]
    labels = {"precision": "precision", "optimizer": "optimizer", "card": "card"}
    factors = [Factor(key, label, sorted({arm.levels[key] for arm in arms})) for key, label in labels.items()]
    return Results(
        name="runs outside of studies",
        question="Runs that differ in more than one option do not show which option made the difference.",
        created="",
        updated="",
        seeds=sorted({trial.seed for arm in arms for trial in arm.trials}),
        memory_fraction=0.0,
        machine={},
        groups=[Group(RUNS_GROUP, "runs outside of studies", "", "", "", factors, [])],
        arms=arms,
    )


def _arm(record: RunRecord, live: frozenset[Path], root: Path) -> Arm:
    path, metrics = record.path, summary_metrics(record)
    name = name_below(path, root)
    status = "running" if path in live else "finished" if record.finished else INTERRUPTED
    reasons = [*record.problems, *(["not finished"] if status == INTERRUPTED else [])]
    card, seed = machine_name(record.environment), number(record.config.get("seed"))
    optimizer = text(mapping(record.config.get("optim")).get("name"))
    levels = {"precision": record.precision, "optimizer": optimizer, "card": card}
    trial = Trial(
        seed=int(seed) if seed is not None else 0,
        status=status,
        reason="; ".join(reasons),
        run=str(path),
        device=card,
        attempts=1,
        started=text(record.run.get("created")),
        metrics=metrics,
    )
    return Arm(
        id=name,
        label=name.removeprefix("runs/"),
        group=RUNS_GROUP,
        levels={key: value or "unknown" for key, value in levels.items()},
        baseline=name,
        emulated=record.emulated,
        trials=[trial],
        estimates={key: Estimate(value, None, None, 1) for key, value in metrics.items()},
    )
