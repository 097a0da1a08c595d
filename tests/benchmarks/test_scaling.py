"""The scaling benchmark, with two CPU processes in place of two GPUs."""

import json
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import Case
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from tests.train.tiny_run import ONE_THREAD, SHAPE, write_text


def test_cases_have_those_of_one_gpu_before_them() -> None:
    found = list(scaling.cases((1, 2, 4, 8)))
    assert len(set(found)) == len(found) == len({case.name for case in found})
    for index, case in enumerate(found):
        if case.mode == "replicate":
            assert case.alone in found[: index + 1]
    for tokens in (8 * 65_536, 65_536):
        assert Case("124m", "muon", "fp8", 8, tokens) in found
    slow = [case for case in scaling.cases((1, 2), p2p=False) if not case.p2p]
    assert slow and all(case.gpus == 2 and case.alone.p2p for case in slow)


def test_a_forecast_and_its_error() -> None:
    one, two = (Case("124m", "adamw", "bf16", gpus, gpus * 65_536) for gpus in (1, 2))
    expected = scaling.forecast(two, "h200")
    speed = expected["tokens_per_second"]
    assert expected["case"] == two.name and speed["low"] < speed["expected"] < speed["high"]
    rows = [
        {"case": case.name, **vars(case), "p10": p50 - 1, "p50": p50, "p90": p50 + 1, "peak_gib": 20.5,
         "watts": 700.0, "bus_bandwidth": bandwidth}
        for case, p50, bandwidth in ((one, 655_360.0, None), (two, 1_250_000.0, 3e11))
    ]  # fmt: skip
    line = [cell.strip() for cell in scaling.table(rows, [expected])[-1].strip("|").split("|")]
    assert line[0] == two.name and line[3:6] == ["95.4%", "4.86", "300.0"]
    assert line[9] == f"{speed['expected'] / 1_250_000 - 1:+.1%}"


@pytest.mark.full
def test_measured_rows_and_resumed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    for constant, made in (("PRESETS", ("demo",)), ("TOKENS", 256), ("LARGE", 512), ("SHARDED", ())):
        monkeypatch.setattr(scaling, constant, made)
    write_text(tmp_path / "text.txt")
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", CorpusOptions(vocab_size=300))
    model = [f"--model.{key}={value}" for key, value in SHAPE.items()]
    more = "--batch.sequence_length 32 --compute.device cpu --compute.attention reference"
    given = ["--data", str(tmp_path / "data"), "--gpus", "1,2", *more.split(), *model]
    out = tmp_path / "out"
    few = [*given, "--steps", "6", "--warmup", "2", "--only", "demo-muon-bf16"]
    assert scaling.main(["measure", str(out), *few, "--minutes", "0"]) == 0
    assert not (out / "measured.jsonl").exists()
    assert scaling.main(["measure", str(out), *few]) == 0
    rows = scaling.read_rows(out / "measured.jsonl")
    assert [(row["gpus"], row["tokens"]) for row in rows] == [
        (1, 256), (1, 512), (2, 512), (1, 128), (2, 256)
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["p10"] <= row["p50"] <= row["p90"] and "DATA" in row["command"]
        assert (row["bus_bandwidth"] is None) == (row["gpus"] == 1)
    assert scaling.main(["measure", str(out), *few]) == 0  # one row per case
    assert len(scaling.read_rows(out / "measured.jsonl")) == len(rows)
    assert scaling.main(["table", str(out), "--markdown", str(out / "table.md")]) == 0
    assert len((out / "table.md").read_text().splitlines()) == 2 + len(rows)

    words = ["--preset", "demo", "--tokens", "64", "--steps", "40", "--gpus", "2", "--then", "1"]
    assert scaling.main(["resume", str(out), *given, *words]) == 0
    differences = json.loads((out / "resume.json").read_text())["largest_relative_difference"]
    assert differences["2"] == 0 and differences["1"] < 1e-3
