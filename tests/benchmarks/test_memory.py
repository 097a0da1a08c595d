"""The benchmark of optimizer states, run as a command on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import memory


@pytest.mark.full
def test_weights_in_bfloat16_over_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "memory.json"
    small = "--preset demo --tokens 512 --micro-tokens 256 --steps 2 --warmup 1 --model.num_hidden_layers 2"
    words = f"{small} --arms adamw:8bit:weights:offload --compute.device cpu --json {file}".split()
    assert memory.main(words) == 0
    (arm,) = json.loads(file.read_text())["arms"]
    assert arm["result"]["accumulation"] == 2 and arm["result"]["finite"]
    assert arm["result"]["optimizer_ms"] > 0 and arm["modelled_gib"] > 0


def test_experts_are_modelled_in_the_formats_of_their_own_products() -> None:
    """A GPU may multiply in FP8 natively but emulate the grouped products of experts, as consumer cards do."""
    config = {
        "model": {"num_experts_per_tok": 4, "moe_intermediate_size": 4096, "vocab_size": 512},
        "precision": {"name": "fp8-rowwise"},
        "compute": {"activation_checkpointing": "block"},
    }
    spec = {"preset": "indicmoe-60m", "micro_tokens": 131072, "config": config}
    result = {"micro_tokens": 131072, "precision": "fp8-rowwise", "compile": "fused"}
    dense, grouped = (
        memory.modelled_gib(spec, result | {"native_formats": formats})
        for formats in (["fp8"], ["fp8", "fp8-grouped"])
    )
    assert dense[0] > grouped[0] and dense[1] == grouped[1] == 0
