"""Weight decay that grows with the epochs of a run."""

from pathlib import Path
from typing import Any

import pytest

from deskside.train.prepare import prepared_run
from tests.train import tiny_run


def test_weight_decay_grows_with_the_epochs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is twice as large at twice the epochs at which it starts to grow, zero below, and the same after a resume."""
    decays: list[float] = []
    original = prepared_run.build

    def build(*arguments: Any, **given: Any) -> Any:
        optimizer = original(*arguments, **given)
        decays.append(optimizer.muon.peak_weight_decay)
        return optimizer

    monkeypatch.setattr(prepared_run, "build", build)
    schedule = {"length": "20 steps"}
    tiny_run.train(tmp_path, tiny_run.config(data, schedule=schedule), "plain")
    plain, plan = decays[-1], tiny_run.plan(tmp_path / "plain")
    epochs = plan["scaling_tokens"] / plan["train_tokens"]
    for name, begin, factor in (("twice", epochs / 2, 2.0), ("few", 2 * epochs, 1.0)):
        config = tiny_run.config(data, schedule=schedule, optim={"weight_decay_epochs": begin})
        tiny_run.train(tmp_path, config, name)
        assert decays[-1] == pytest.approx(factor * plain)
    assert tiny_run.curve(tmp_path / "few") == tiny_run.curve(tmp_path / "plain")
    assert tiny_run.curve(tmp_path / "twice") != tiny_run.curve(tmp_path / "plain")
    (tmp_path / "twice" / "summary.json").unlink()
    tiny_run.resume(tmp_path / "twice")
    assert decays[-1] == pytest.approx(2 * plain)
