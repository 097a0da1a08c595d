"""The terminal's plain lines, and trackers that are off unless asked for."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deskside.config.parts import TrackConfig
from deskside.errors import UsageError
from deskside.train.hooks import MetricsFile, Terminal, trackers
from deskside.train.rundir import RunDirectory


def row(step: int, **given: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "val_bpb": None, "tokens_per_second": 1234.0, **given}


def test_plain_lines_come_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(0, 500)
    for step in range(1, 501):
        terminal.on_step(row(step, val_bpb=1.25 if step == 200 else None), 500)
    terminal.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1/500  loss 2.500  1,234 tok/s"
    assert lines[-1] == "step 500/500  loss 2.500  val 1.250 bpb  1,234 tok/s" and len(lines) < 5


def test_trackers_are_off_and_say_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    assert trackers(TrackConfig(), run, {}) == []
    for name, asked in (("trackio", TrackConfig(trackio="p")), ("wandb", TrackConfig(wandb="p"))):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            UsageError, match=rf"track\.{name}: needs its package: pip install 'deskside\[{name}\]'"
        ):
            trackers(asked, run, {})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"track\.tensorboard: needs its package"):
        trackers(TrackConfig(tensorboard=True), run, {})


def test_a_tracker_gets_the_numbers_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    package = SimpleNamespace(
        init=lambda **given: said.append(given),
        log=lambda numbers, step: said.append((numbers, step)),
        finish=lambda: said.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    run = RunDirectory(tmp_path / "mine")
    (tracker,) = trackers(TrackConfig(wandb="project"), run, {"seed": 1})
    tracker.on_step(row(3, skipped=False), 10)
    tracker.close()
    assert said[0] == {"project": "project", "name": "mine", "config": {"seed": 1}}
    assert said[1] == ({"loss": 2.5, "tokens_per_second": 1234.0, "skipped": 0.0}, 3) and said[2] == "finish"


def test_the_metrics_file_gets_every_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    hook = MetricsFile(run)
    for step in (1, 2):
        hook.on_step(row(step), 2)
    hook.close()
    assert [r["step"] for r in run.read_metrics()] == [1, 2]
