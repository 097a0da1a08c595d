"""Cautions of a study whose trials shared their GPUs with other processes."""

from dataclasses import replace
from pathlib import Path

from deskside.report.study_report import verdict
from deskside.study.narrative.cautions import cautions, trials_on_shared_gpus
from deskside.study.results import Results
from deskside.study.stats.languages import read_records
from tests.study.made import results as made


def shared(results: Results, trials: int) -> Results:
    """Return the study with some trials of the first arm that shared their GPU for half of the time."""
    first = results.arms[0]
    marked = [replace(trial, metrics={**trial.metrics, "gpu_shared": 0.5}) for trial in first.trials[:trials]]
    return replace(results, arms=[replace(first, trials=marked + first.trials[trials:]), *results.arms[1:]])


def test_shared_gpus(tmp_path: Path) -> None:
    alone, two = made(), shared(made(), 2)
    assert not trials_on_shared_gpus(alone) and not cautions(alone, read_records(alone, tmp_path))
    assert len(trials_on_shared_gpus(two)) == 2
    (caution,) = cautions(two, read_records(two, tmp_path))
    assert "2 of" in caution
    assert verdict(two) != verdict(alone)
