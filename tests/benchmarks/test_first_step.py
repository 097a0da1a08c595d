"""The start-up table on a CPU: the parts add up, and warm starts use the caches of the first one."""

import json
from pathlib import Path

import pytest

from benchmarks import first_step

SMALL = "--preset demo --tokens 512 --device cpu --precision fp32 --model.num_hidden_layers 2"


@pytest.mark.full
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "first.json"
    assert first_step.main([*SMALL.split(), "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["results"]
    values = [start["value"] for start in row["starts"]]
    assert [value["attention"]["full"]["trial"] for value in values] == ["measured", "cached", "cached"]
    assert len({value["attention"]["full"]["name"] for value in values}) == 1
    for value in values:
        seconds = first_step.parts(value["cold_start"])
        assert all(part >= 0 for part in seconds.values())
        assert sum(seconds.values()) == pytest.approx(value["cold_start"]["first step done"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*first_step.STATES, *values[0]["cold_start"]))


def test_an_error_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_step.main([*SMALL.split(), "--data", "no-such-folder"]) == 1
    assert "no-such-folder" in capsys.readouterr().out
    assert first_step.main(["--precision", ""]) == 2
