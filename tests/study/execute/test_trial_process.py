"""What a trial's process writes, in this process."""

import json
from pathlib import Path
from typing import Any

from deskside.study.execute.trial_process import TrialJob, train
from tests.train import tiny_run

SETTINGS: dict[str, Any] = {"schedule": {"length": "20 steps"}, "checkpoint": {"every": "10 steps"}}


def trial(data: Path, run: Path, *, resume: bool = False, keep_model: bool) -> dict[str, Any]:
    """Run a trial and return its summary without what depends on the machine's speed."""
    if not resume:
        (run / "checkpoints").mkdir(parents=True)
    config = tiny_run.config(data, **SETTINGS).model_dump(mode="json")
    assert train(TrialJob("", str(run), config, "a test", resume, 1.0, keep_model)) == ("finished", "")
    summary = json.loads((run / "summary.json").read_text())
    return {k: v for k, v in summary.items() if k != "mfu" and "second" not in k and "memory" not in k}


def test_only_a_kept_model_is_written(data: Path, tmp_path: Path) -> None:
    kept = trial(data, tmp_path / "kept", keep_model=True)
    dropped = trial(data, tmp_path / "dropped", keep_model=False)
    assert kept == dropped
    assert (tmp_path / "kept" / "model" / "model.safetensors").exists()
    assert not (tmp_path / "dropped" / "model").exists()
    assert tiny_run.checkpoints(tmp_path / "kept")[-1] == "step-000000020"
    assert tiny_run.checkpoints(tmp_path / "dropped")[-1] == "step-000000010"


def test_a_trial_that_was_killed_at_its_end_is_resumed(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    straight = trial(data, run, keep_model=False)
    (run / "summary.json").unlink()
    assert trial(data, run, resume=True, keep_model=False) == straight
