"""Two GPUs, under torchrun or --gpus: replicas and shards train like one GPU and resume, and their export loads."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.weights.load import load_model
from tests.gpu.card import ADAMW, NEEDS_CARD, config, losses, parts
from tests.train import tiny_run
from tests.train.test_resume import arguments, preset

pytestmark = [
    *NEEDS_CARD,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

STEPS = 40
CHANGES: dict[str, Any] = {
    "optim": {**ADAMW, "lr": 1e-3},
    "schedule": {"length": f"{STEPS} steps"},
    "checkpoint": {"every": "10 steps"},
}


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run on one GPU."""
    return losses(tiny_run.train(tmp_path_factory.mktemp("alone"), config(data, **CHANGES)).run.path)


def check_close(run: Path, alone: list[float]) -> None:
    assert [row["step"] for row in tiny_run.rows(run)] == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(alone, abs=1e-2)
    assert alone[-1] < alone[0] - 0.5


def written(folder: Path, data: Path, mode: str) -> str:
    return preset(folder, data, **parts({**CHANGES, "parallel": {"mode": mode}}))


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_two_cards_train_like_one(mode: str, alone: list[float], data: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    file = written(tmp_path, data, mode)
    assert tiny_run.program(arguments(tmp_path, "run", file), log, 2).wait(200) == 0, log.read_text()
    run = tmp_path / "run"
    check_close(run, alone)
    check_export(run)


def test_gpus_starts_them(alone: list[float], data: Path, tmp_path: Path) -> None:
    """The run equals one under torchrun, and one GPU resumes it after a stop."""
    log, run = tmp_path / "log", tmp_path / "run"
    words = [*arguments(tmp_path, "run", written(tmp_path, data, "replicate")), "--gpus", "2"]
    first = tiny_run.program(words, log)
    tiny_run.kill_at_step(run, 14, lambda: first.send_signal(signal.SIGINT), lambda: first.poll() is None)
    assert first.wait(60) == 130, log.read_text()
    assert tiny_run.program(["train", "--resume", str(run)], log).wait(200) == 0, log.read_text()
    check_close(run, alone)
    check_export(run)


def test_shards_resume(alone: list[float], data: Path, tmp_path: Path) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    first = tiny_run.program(arguments(tmp_path, "run", written(tmp_path, data, "shard")), log, 2)

    def kill() -> None:
        for pid in tiny_run.descendants(first.pid):
            os.kill(pid, signal.SIGKILL)

    tiny_run.kill_at_step(run, 14, kill, lambda: first.poll() is None)
    first.wait(30)
    assert (run / "checkpoints" / "step-000000010" / "sharded").is_dir()
    assert tiny_run.program(["train", "--resume", str(run)], log, 2).wait(200) == 0, log.read_text()
    assert "resumed at step" in tiny_run.events(run)
    check_close(run, alone)
    check_export(run)


def check_export(run: Path) -> None:
    """Check that the run's own checkpoint (sharded or not) and its Hugging Face model are the same model."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    ours = load_model(run).model
    tokens_BT = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_BT), theirs(tokens_BT).logits, atol=1e-4, rtol=1e-4)
