"""The device that a checkpoint's tensors are read to, and the order of its writes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.run.directory import RunDirectory
from deskside.train.state import checkpointer
from deskside.train.state.checkpointer import Checkpointer
from deskside.weights import checkpoint
from deskside.weights.checkpoint_folder import OPTIMIZER, WEIGHTS
from tests.train import tiny_run


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_state_is_read_to_the_host(
    offload: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may exceed the GPU's memory. "meta" replaces the GPU, and the tensors are still read on the CPU."""
    optim = {"name": "adamw", "lr": 3e-3, "offload": offload}
    config = tiny_run.config(data, optim=optim, schedule={"length": "20 steps"})
    whole = tiny_run.train(tmp_path, config, "whole").run.path
    places: dict[str, str] = {}
    load_tensors, load_newest = checkpointer.files.load_tensors, Checkpointer.load_newest

    def load(found: Any, name: str, device: torch.device) -> Any:
        places[name] = device.type
        return load_tensors(found, name, torch.device("cpu"))

    def newest(self: Checkpointer) -> Any:
        self.world = replace(self.world, device=torch.device("meta"))
        return load_newest(self)

    def killed(self: Checkpointer, *given: Any) -> None:
        save(self, *given)
        raise KeyboardInterrupt

    save = Checkpointer.save
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            tiny_run.train(tmp_path, config)
    monkeypatch.setattr(checkpointer.files, "load_tensors", load)
    monkeypatch.setattr(Checkpointer, "load_newest", newest)
    run = tiny_run.resume(tmp_path / "run").run
    assert isinstance(run, RunDirectory)
    assert places == {WEIGHTS: "meta", OPTIMIZER: "cpu" if offload else "meta"}
    assert tiny_run.curve(run.path) == tiny_run.curve(whole)


def test_the_metrics_are_on_the_disk_before_a_checkpoint_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the order of the run's writes, and the metrics' length at that
    moment. Later steps may already be logged.
    """
    synced, saved = 0, []
    original_sync, original_save = os.fsync, checkpoint.save

    def fsync(descriptor: int) -> None:
        nonlocal synced
        original_sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == "metrics.jsonl":
            synced = path.stat().st_size

    def save(folder: Path, step: int, *args: Any) -> Any:
        metrics = folder.parent / "metrics.jsonl"
        on_disk = metrics.read_bytes()[:synced].count(b"\n") if metrics.exists() else 0
        saved.append((step, on_disk >= step))
        return original_save(folder, step, *args)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoint, "save", save)
    tiny_run.train(tmp_path, tiny_run.config(data, schedule={"length": "20 steps"}))
    assert saved == [(0, True), (10, True), (20, True)]
