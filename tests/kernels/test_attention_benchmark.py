"""The attention benchmark counts the visible pairs, and also runs on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import attention as benchmark
from deskside.kernels.attention import Requirements, document_ids

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_visible_pairs_are_those_of_the_mask(
    window: int | None, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "MEAN_DOCUMENT", 7)
    need = Requirements(3, 40, 2, 1, 8, torch.float32, CPU, window=window, documents=masked)
    cu = benchmark.documents(3, 40, CPU) if masked else None
    distance = torch.arange(40)[:, None] - torch.arange(40)[None, :]
    seen = (distance >= 0) & (distance < (window or 40))
    seen = seen.expand(3, 40, 40)
    if cu is not None:
        assert set(range(0, 121, 40)) <= set(cu.tolist()) and len(cu.unique()) < len(cu)
        ids = document_ids(cu, 3, 40)
        seen = seen & (ids[:, :, None] == ids[:, None, :])
    assert benchmark.visible_pairs(need, cu) == int(seen.sum())


def test_it_prints_times_and_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = "--device cpu --batch 2 --tokens 64 --shapes 4x2x16 --windows none 8 --documents no yes --runs 2"
    words += f" --backends chunked reference sdpa cudnn --json {out}"
    monkeypatch.setattr(sys, "argv", ["attention.py", *words.split()])
    assert benchmark.main() == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert [(p["window"], p["documents"]) for p in printed["problems"]] == [
        (None, False),
        (None, True),
        (8, False),
        (8, True),
    ]
    for problem in printed["problems"]:
        rows = {row["backend"]: row for row in problem["backends"]}
        assert rows["chunked"]["forward_ms"] > 0 and rows["chunked"]["backward_tflops"] >= 0
        assert "not on cpu" in rows["cudnn"]["reason"]
        assert ("reason" in rows["sdpa"]) == (problem["window"] is not None or problem["documents"])
