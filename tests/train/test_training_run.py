"""Runs that are refused before anything is built, and runs that a program starts, such as a notebook."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import deskside
from deskside.train import parallel, training_run
from deskside.train.parallel import World
from deskside.utils.errors import UsageError
from tests.train import tiny_run


@dataclass(frozen=True)
class TwoProcesses(World):
    """A world of two processes of which only this one exists, so that it may not communicate."""

    size: int = 2

    def broadcast_result(self, make: Any) -> Any:
        raise AssertionError("the run began")


@pytest.mark.parametrize(
    ("parts", "key"),
    [({"optim": {"gradients": "host"}}, "optim.gradients"), ({"batch": {"tokens": 96}}, "batch.tokens")],
)
def test_what_several_processes_cannot_do_is_refused_at_once(
    parts: dict[str, Any], key: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(data, schedule={"length": "2 steps"}, **parts)
    run = tiny_run.train(tmp_path, config, "one").run.path
    (run / "summary.json").unlink()
    monkeypatch.setattr(parallel, "init_distributed", lambda *_: TwoProcesses(torch.device("cpu")))
    monkeypatch.setattr(parallel, "destroy_distributed", lambda world: None)
    with pytest.raises(UsageError, match=f"^{key}: "):
        tiny_run.train(tmp_path, config, "two")
    assert not (tmp_path / "two").exists()
    with pytest.raises(UsageError, match=f"^{key}: "):
        training_run.resume(run)


def test_the_clock_begins_where_a_program_says(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deskside, "STARTED", time.perf_counter() - 50_000)
    config = tiny_run.config(data, schedule={"length": "2 steps"})
    where = (tmp_path, "run", "run")
    outcome = training_run.start(config, where, "a test", began=time.perf_counter())
    startup = tiny_run.plan(outcome.run.path)["startup"]["seconds"]
    assert outcome.summary["seconds"] < 10_000 and sum(startup.values()) < 10_000
