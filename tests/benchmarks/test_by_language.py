"""The table of bits per byte by language, compared with scipy."""

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from benchmarks import by_language

BPB = {
    ("dense", 1): {"hi": 1.00, "ta": 0.80},
    ("dense", 2): {"hi": 1.02, "ta": 0.81},
    ("dense", 3): {"hi": 1.01, "ta": 0.79},
    ("moe", 1): {"hi": 0.95, "ta": 0.79},
    ("moe", 2): {"hi": 0.98, "ta": 0.80},
    ("moe", 3): {"hi": 0.96, "ta": 0.80},
}


def make_runs(folder: Path) -> dict[str, list[str]]:
    arms: dict[str, list[str]] = {"dense": [], "moe": []}
    for (arm, seed), languages in BPB.items():
        run = folder / f"{arm}-{seed}"
        run.mkdir()
        (run / "run.json").write_text(json.dumps({"config": {"seed": seed}}))
        values = {name: {"bpb": bpb, "bytes": 9} for name, bpb in languages.items()}
        (run / "summary.json").write_text(json.dumps({"status": "finished", "val_languages": values}))
        arms[arm].append(str(run))
    return arms


def test_means_and_paired_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = make_runs(tmp_path)
    arguments = [word for name, runs in arms.items() for word in ("--arm", name, *runs)]
    monkeypatch.setattr("sys.argv", ["by_language", *arguments, "--json", str(tmp_path / "out.json")])
    by_language.main()
    rows = {(row["arm"], row["language"]): row for row in json.loads((tmp_path / "out.json").read_text())}
    assert len(rows) == 6
    for language in ("hi", "ta"):
        logs = [math.log(BPB["moe", seed][language] / BPB["dense", seed][language]) for seed in (1, 2, 3)]
        row = rows["moe", language]
        low, high = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
        assert row["bpb"] == pytest.approx(sum(BPB["moe", seed][language] for seed in (1, 2, 3)) / 3)
        assert row["relative"] == pytest.approx(math.expm1(sum(logs) / 3))
        assert (row["relative_low"], row["relative_high"]) == pytest.approx(
            (math.expm1(low), math.expm1(high))
        )
    assert rows["dense", "mean"]["bpb"] == pytest.approx((1.01 + 0.80) / 2)
    assert "relative" not in rows["dense", "hi"]
    assert "| moe | hi | 3 | 0.9633 |" in capsys.readouterr().out


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    arms = make_runs(tmp_path)
    with pytest.raises(SystemExit, match="seed 1"):
        by_language.read_arm([arms["dense"][0], arms["moe"][0]])
    (tmp_path / "dense-1" / "summary.json").unlink()
    with pytest.raises(SystemExit, match="dense-1"):
        by_language.read_arm(arms["dense"])
