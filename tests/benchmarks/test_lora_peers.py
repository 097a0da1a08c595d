"""The comparison of LoRA fine-tuning with TRL, at a tiny size."""

import json
from pathlib import Path

import pytest

from benchmarks import lora_peers


@pytest.mark.full
def test_both_arms_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    out = tmp_path / "lora.json"
    words = [
        "--shapes",
        "tiny",
        "--arms",
        "deskside,trl",
        "--rows",
        "2",
        "--length",
        "256",
        "--steps",
        "6",
        "--warmup",
        "2",
        "--json",
    ]
    assert lora_peers.main([*words, str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["arm"], row["status"], len(row["losses"])) for row in rows] == [
        ("deskside", "ok", 6),
        ("trl", "ok", 6),
    ]
    # random weights have a loss slightly above ln 512
    assert all(abs(row["losses"][0] - 6.24) < 0.05 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_an_arm_that_did_not_run_says_why() -> None:
    row = {
        "shape": "tiny",
        "arm": "trl",
        "status": "failed",
        "error": "ModuleNotFoundError: No module named 'trl'",
    }
    assert lora_peers.line(row).split() == ["tiny", "trl", "failed:", *row["error"].split()]
