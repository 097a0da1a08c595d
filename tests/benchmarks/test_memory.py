"""The benchmark of optimizer states on a CPU, as the command is given."""

import json
from pathlib import Path

import pytest

from benchmarks import memory


def test_weights_in_bfloat16_over_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "memory.json"
    small = "--preset demo --tokens 512 --micro-tokens 256 --steps 2 --warmup 1 --model.num_hidden_layers 2"
    words = f"{small} --arms adamw:8bit:weights:offload --compute.device cpu --json {file}".split()
    assert memory.main(words) == 0
    (arm,) = json.loads(file.read_text())["arms"]
    assert arm["result"]["accumulation"] == 2 and arm["result"]["finite"]
    assert arm["result"]["optimizer_ms"] > 0 and arm["modelled_gib"] > 0
