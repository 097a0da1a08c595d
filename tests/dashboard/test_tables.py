"""Tables and CSV files contain the data of results.json."""

import io
import math

import pandas as pd
import pytest

from deskside.dashboard import tables
from deskside.study.metrics import BY_KEY, METRICS
from deskside.study.stats.compare import compare
from tests.study import made

WHOLE = compare(made.results())


def test_the_csv_of_trials_equals_the_results() -> None:
    frame = pd.read_csv(
        io.StringIO(tables.trials(WHOLE).to_csv(index=False)), keep_default_na=False, na_values=[""]
    )
    rows = {(row["arm"], row["seed"]): row for _, row in frame.iterrows()}
    assert len(rows) == sum(len(arm.trials) for arm in WHOLE.arms)
    for arm in WHOLE.arms:
        for trial in arm.trials:
            row = rows[arm.id, trial.seed]
            assert row["status"] == trial.status and row["factor_size"] == arm.levels["size"]
            for metric in METRICS:
                value = trial.metrics.get(metric.key)
                assert (
                    math.isnan(row[metric.key]) if value is None else row[metric.key] == pytest.approx(value)
                )


def test_the_csv_of_arms_carries_every_interval() -> None:
    frame = tables.arms(WHOLE).set_index("arm")
    arm = WHOLE.arm("small-gqa_on-fp4_off")
    assert arm is not None
    found, against = arm.estimates["val_bpb"], arm.comparison("val_bpb")
    row = frame.loc[arm.id]
    assert (row["val_bpb"], row["val_bpb_low"], row["val_bpb_high"]) == (found.mean, found.low, found.high)
    assert against is not None and row["val_bpb_relative_low"] == against.relative_low
    assert row["val_bpb_verdict"] == against.verdict


def test_what_was_not_measured_is_empty_and_no_zero() -> None:
    cpu = compare(made.results(gpu=False))
    assert tables.trials(cpu)["watts"].isna().all()
    assert BY_KEY["watts"].heading not in tables.display_arms(cpu).columns
    assert "watts" not in "".join(tables.display_trials(cpu).columns)


def test_shown_numbers_are_in_the_shown_unit() -> None:
    frame = tables.display_arms(WHOLE).set_index("arm")
    assert frame.loc["small, GQA off, FP4 off", "parameters, M"] == pytest.approx(25.0)
    assert frame.loc["small, GQA off, FP4 on", "products"] == "emulated"
    assert frame.loc["medium, GQA off, FP4 on", "status"] == "2 of 3; 1 out of memory"
    assert list(frame.columns)[:3] == [
        "validation loss, bits per byte",
        "speed, tokens/s",
        "peak memory, GiB",
    ]


def test_who_lacks_a_metric_is_named_with_the_reason() -> None:
    bare = compare(made.results(seeds=1))
    told = tables.not_measured(bare.arms, "val_bpb")
    assert "medium, GQA off, FP4 on (out of memory)" in told and "(diverged)" in told
    assert tables.not_measured(WHOLE.arms, "val_bpb") == ""
