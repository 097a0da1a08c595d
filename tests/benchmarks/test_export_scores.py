"""Scores of a study's exported models are kept, resumed, and compared by seed as in scipy."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks import export_scores
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.study.results import Arm, Results, Trial
from tests.evaluate.made_model import make
from tests.study.made import results as made_results

SEEDS = (1, 2, 3)


def results() -> Results:
    """Return a baseline and two arms with three seeds each; one trial ran out of memory."""

    def arm(name: str) -> Arm:
        trials = [Trial(seed, "finished", run=f"runs/{name}-s{seed}") for seed in SEEDS]
        return Arm(name, name, "main", {}, "base", False, trials=trials)

    arms = [arm("base"), arm("a"), arm("b")]
    arms[2].trials[2] = Trial(3, "oom", run="runs/b-s3")
    return replace(made_results(), arms=arms)


def test_differences_are_those_of_scipy() -> None:
    draw = np.random.default_rng(0)
    scores = {
        f"runs/{name}-s{seed}": float(draw.normal(1.1, 0.01)) for name in ("base", "a", "b") for seed in SEEDS
    }
    text = export_scores.table(results(), scores)
    difference = [scores[f"runs/a-s{seed}"] - scores[f"runs/base-s{seed}"] for seed in SEEDS]
    interval = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    row = next(line for line in text.splitlines() if line.startswith("| a |"))
    assert f"{np.mean(difference):+.4f} | {interval.low:+.4f} to {interval.high:+.4f} | no" in row
    assert "| b | 2 |" in text and "baseline" in text
    clear = {
        run: 1.0 + 0.001 * int(run[-1]) + 0.1 * ("/a" in run) * (1 + 1e-3 * int(run[-1])) for run in scores
    }
    assert "| yes |" in export_scores.table(results(), clear)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make(tmp_path / "model").folder
    (tmp_path / "text.jsonl").write_text('{"text": "the sea and the ships"}\n' * 30)
    options = CorpusOptions(tokenizer=str(model), workers=1, quiet=True, val_fraction=0.3)
    prepare([str(tmp_path / "text.jsonl")], tmp_path / "data", options)
    study = tmp_path / "study"
    study.mkdir()
    (study / "results.json").write_text(json.dumps(results().to_json()))
    words = [str(study), "--data", str(tmp_path / "data"), "--row-tokens", "16"]
    for name in ("base-s1", "a-s1"):
        (study / "runs" / name).mkdir(parents=True)
        (study / "runs" / name / "model").symlink_to(model)
    assert export_scores.main(words) == 2  # the models of the other trials were deleted
    saved = json.loads((study / "export_scores.json").read_text())
    kept = saved["scores"]
    assert kept.keys() == {"runs/base-s1"} and 0 < kept["runs/base-s1"] < 20
    finished = {trial.run for arm in results().arms for trial in arm.finished()}
    scores = dict.fromkeys(finished, kept["runs/base-s1"]) | {"runs/a-s1": 2.0}
    (study / "export_scores.json").write_text(json.dumps({**saved, "scores": scores}))
    assert export_scores.main(words) == 0
    assert export_scores.table(results(), scores) == capsys.readouterr().out.strip()
    assert export_scores.main([*words[:-1], "8"]) == 2
    prepare([str(tmp_path / "text.jsonl")], tmp_path / "other", replace(options, val_fraction=0.5))
    assert export_scores.main([words[0], "--data", str(tmp_path / "other"), *words[3:]]) == 2
    assert export_scores.main([str(tmp_path), *words[1:]]) == 2
