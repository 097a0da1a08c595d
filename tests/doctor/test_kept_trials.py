"""`deskside doctor --trials` and `--clear-trials`: what is cached, whether it is valid here, and how it is deleted."""

import json
from pathlib import Path

import pytest

from deskside.cli.main import main
from deskside.utils.trials import TrialCache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialCache:
    monkeypatch.setenv("DESKSIDE_CACHE", str(tmp_path))
    cache = TrialCache()
    cache.keep("attention", {"tokens": 2048, "window": None, "causal": True}, {"name": "cudnn"}, 2.5)
    elsewhere = TrialCache()
    elsewhere.__dict__["machine"] = {"card": "another"}
    elsewhere.keep("attention", {"tokens": 512}, {"name": "flash"}, 1.0)
    return cache


def test_kept_trials_are_listed(cache: TrialCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--trials", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(cache.folder)
    rows = {row["chosen"]: row for row in found["trials"]}
    assert {name: row["valid_here"] for name, row in rows.items()} == {"cudnn": True, "flash": False}
    assert rows["cudnn"]["seconds"] == 2.5 and rows["cudnn"]["kind"] == "attention"
    assert "2048" in rows["cudnn"]["problem"] and "window" not in rows["cudnn"]["problem"]
    assert main(["doctor", "--trials"]) == 0
    text = capsys.readouterr().out
    assert "cudnn" in text and "flash" in text


def test_kept_trials_are_deleted(cache: TrialCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--clear-trials", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == 2
    assert cache.trials() == []
    assert main(["doctor", "--trials"]) == 0


@pytest.mark.parametrize("wrong", [("--trials", "--quick"), ("--trials", "--clear-trials")])
def test_one_thing_at_a_time(wrong: tuple[str, ...], cache: TrialCache) -> None:
    assert main(["doctor", *wrong]) == 2
    assert len(cache.trials()) == 2
