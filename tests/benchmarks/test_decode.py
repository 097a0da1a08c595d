"""The generation benchmark run as a command on a CPU, compared with transformers, and its arithmetic."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import decode
from deskside.config.model import ModelConfig
from deskside.engine.sampling import GREEDY
from deskside.model.transformer import Transformer

SMALL = "--preset demo --batch 1,3 --peer-batch 1 --prompt 9 --new 14 --device cpu --dtype float32 --runs 1"


@pytest.mark.full
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decode.json"
    assert decode.main(f"{SMALL} --peers dynamic --kernels --json {file}".split()) == 0
    report = json.loads(file.read_text())
    assert [(r["arm"], r["batch"]) for r in report["results"]] == [
        ("deskside", 1),
        ("deskside", 3),
        ("transformers dynamic", 1),
    ]
    for row in report["results"]:
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert row["first_seconds"] > 0 and row["of_copy_bandwidth"] > 0
    printed = capsys.readouterr().out
    assert "One step of batch 3" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.full
def test_quantized_weights(tmp_path: Path) -> None:
    shares = []
    for quantize in ("none", "int8"):
        file = tmp_path / f"{quantize}.json"
        words = f"{SMALL} --peers= --quantize {quantize} --json {file}".split()
        assert decode.main(words) == 0
        report = json.loads(file.read_text())
        row = report["results"][0]
        # The bytes of a step, from its share of the bandwidth, are less than half of those in float32.
        shares.append(row["of_copy_bandwidth"] * row["step_ms"] * report["copy_bandwidth"])
    assert 0.25 < shares[1] / shares[0] < 0.75


def test_wrong_usage_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--preset", "nothing"]) == 2
    assert decode.main(["--preset", "demo", "--new", "1"]) == 2
    assert decode.main(["--preset", "demo", "--quantize", "int8"]) == 2  # compared with transformers
    assert "no such preset" in capsys.readouterr().err
    for words in ("--peers vllm", "--batch 0"):
        with pytest.raises(SystemExit):
            decode.main(words.split())


def test_bytes_of_a_step() -> None:
    """A step reads every weight except the embedding once, and the keys and values of all rows."""
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}
    model = Transformer(ModelConfig(**shape))
    work = decode.Work(50, 10, 20, GREEDY, torch.device("cpu"))
    weights = sum(p.numel() for p in model.parameters()) - 50 * 16
    assert decode.step_bytes(model, work, 3) == 4 * weights + 3 * 20 * (2 * 2 * 8 * 4)
    tied = Transformer(ModelConfig(**shape, tie_word_embeddings=True))
    assert decode.step_bytes(tied, work, 3) == decode.step_bytes(model, work, 3)
