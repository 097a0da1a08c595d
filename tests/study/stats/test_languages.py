"""The comparison of arms in each language, against scipy."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from deskside.study.stats.languages import MEAN, by_language, read_records
from tests.study.made_languages import LANGUAGES, bits_per_byte, write


def test_means_intervals_and_verdicts_are_those_of_scipy(tmp_path: Path) -> None:
    values = bits_per_byte()
    results = write(tmp_path, values)
    found = by_language(results, results.groups[0], read_records(results, tmp_path))
    assert found is not None and found.languages == list(LANGUAGES) and found.missing == []
    assert len(found.arms) == 2 * (len(LANGUAGES) + 1)
    p_values, verdicts = [], []
    for language in LANGUAGES:
        ours, theirs = ([values[arm, seed][language] for seed in (1, 2, 3)] for arm in ("moe", "dense"))
        one = found.arms["moe", language]
        (comparison,) = (c for c in one.comparisons if c.metric == "val_bpb")
        test = stats.ttest_1samp([math.log(a / b) for a, b in zip(ours, theirs, strict=True)], 0.0)
        low, high = test.confidence_interval(0.95)
        assert one.estimates["val_bpb"].mean == pytest.approx(sum(ours) / 3)
        assert (comparison.relative_low, comparison.relative_high) == pytest.approx(
            (math.expm1(low), math.expm1(high))
        )
        p_values.append(test.pvalue)
        verdicts.append(comparison.verdict)
        assert found.arms["dense", language].comparisons == []
    # The family of a verdict is the languages of the arm, without their mean.
    significant = stats.false_discovery_control(p_values) <= 0.05
    assert [verdict in ("lower", "higher") for verdict in verdicts] == list(significant)
    # The correction matters here.
    assert any(significant) and sum(significant) < sum(p <= 0.05 for p in p_values)
    mean = found.arms["dense", MEAN].estimates["val_bpb"].mean
    assert mean == pytest.approx(
        sum(sum(values["dense", seed].values()) / len(LANGUAGES) for seed in (1, 2, 3)) / 3
    )


def test_what_a_trial_lacks_is_said_and_left_out(tmp_path: Path) -> None:
    values = bits_per_byte()
    del values["moe", 1]["gu"]
    values["dense", 2] = {}
    results = write(tmp_path, values)
    found = by_language(results, results.groups[0], read_records(results, tmp_path))
    assert found is not None
    assert found.missing == ["dense, seed 2: no result for any language.", "moe, seed 1: no result for gu."]
    gu, hi = found.arms["moe", "gu"], found.arms["moe", "hi"]
    assert (gu.estimates["val_bpb"].n, hi.estimates["val_bpb"].n) == (2, 3)
    assert [next(c.n for c in one.comparisons) for one in (gu, hi)] == [1, 2]
    assert next(c.verdict for c in gu.comparisons) == "too few seeds"
    # A mean over fewer languages is another quantity.
    assert found.arms["moe", MEAN].estimates["val_bpb"].n == 2


def test_a_study_without_several_languages_has_no_comparison(tmp_path: Path) -> None:
    results = write(tmp_path, {(arm, 1): {"en": 1.0} for arm in ("dense", "moe")})
    group = results.groups[0]
    assert by_language(results, group, read_records(results, tmp_path)) is None
    summary = tmp_path / "runs" / "moe-s1" / "summary.json"
    summary.write_text(json.dumps({"val_languages": {"en": {"bpb": "x"}, "hi": 3, "ta": {"bpb": None}}}))
    assert by_language(results, group, read_records(results, tmp_path)) is None


def test_trials_that_did_not_finish_and_directories_that_are_gone_are_not_read(tmp_path: Path) -> None:
    results = write(tmp_path, bits_per_byte())
    dense, moe = results.arms
    lost = [replace(moe.trials[0], status="oom"), replace(moe.trials[1], run="runs/\x00"), moe.trials[2]]
    results = replace(results, arms=[dense, replace(moe, trials=lost)])
    assert set(read_records(results, tmp_path)) == {f"runs/dense-s{n}" for n in (1, 2, 3)} | {"runs/moe-s3"}
    found = by_language(results, results.groups[0], read_records(results, tmp_path))
    assert found is not None and found.missing == ["moe, seed 2: no result for any language."]
