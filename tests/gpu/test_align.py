"""DPO and GRPO on a GPU, where the engine's BF16 differs from training's, and where both share memory."""

import json
from pathlib import Path

import pytest
import torch

from deskside.cli import dpo as dpo_command
from deskside.cli import grpo as grpo_command
from deskside.cli import sft as sft_command
from tests.align import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CARD = ("--compute.device", "cuda", "--checkpoint.every", "1000 steps")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught")
    base = tiny.model(folder / "base")
    data = tiny.jsonl(folder / "chats.jsonl", tiny.mostly_wrong())
    argv = [str(base), "--data", str(data), "--data.path", str(folder / "prepared"), "--runs", str(folder)]
    argv += ["--name", "taught", *CARD, "--batch.sequence_length", "128", "--batch.tokens", "2048"]
    assert sft_command.run([*argv, "--schedule.steps", "200", "--optim.lr", "5e-3"]) == 0
    return folder / "taught"


@pytest.mark.parametrize("mode", ["off", "block", "auto"])
def test_dpo_learns_in_bf16(mode: str, taught: Path, tmp_path: Path) -> None:
    data = tiny.jsonl(tmp_path / "pairs.jsonl", tiny.pairs(200))
    argv = [str(taught), "--data", str(data), "--data.path", str(tmp_path / "data"), "--runs", str(tmp_path)]
    argv += ["--name", "d", *CARD, "--batch.sequence_length", "160", "--batch.tokens", "1280"]
    dpo_command.run([*argv, "--schedule.steps", "30", "--optim.lr", "1e-3", "--compute.compile", mode])
    rows = tiny.metrics(tmp_path / "d")
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=2e-3)
    assert json.loads((tmp_path / "d" / "summary.json").read_text())["val_accuracy"] > 0.9


@pytest.mark.parametrize("mode", ["off", "block", "auto"])
def test_grpo_learns_in_bf16(mode: str, taught: Path, tmp_path: Path) -> None:
    data = tiny.jsonl(tmp_path / "questions.jsonl", tiny.questions())
    argv = [str(taught), "--data", str(data), "--data.path", str(tmp_path / "data"), "--runs", str(tmp_path)]
    argv += ["--name", "g", *CARD, "--batch.sequence_length", "64", "--align.answer_tokens", "4"]
    argv += ["--questions", "16", "--schedule.steps", "60", "--optim.lr", "2e-3", "--compute.compile", mode]
    grpo_command.run(argv)
    rows = tiny.metrics(tmp_path / "g")
    summary = json.loads((tmp_path / "g" / "summary.json").read_text())
    assert summary["before"]["val_reward"] < 0.1
    assert summary["val_reward"] > 0.6
    # The engine and training round BF16 differently. The ratio corrects for it, and must stay near one.
    assert all(abs(row["drift"]) < 0.01 for row in rows)
    assert sum(row["clipped"] for row in rows) / len(rows) < 0.05
