"""The tolerant reader returns what can be read, lists every problem, and never raises for damaged content."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.run.record import (
    MISSING,
    TAIL_BYTES,
    lowest_metric,
    number,
    read_brief,
    read_metrics,
    read_new_metrics,
    read_object,
    read_run,
    sample_metrics,
    series,
)
from tests.dashboard import made_up


def test_damaged_runs_have_problems_and_raise_nothing(tmp_path: Path) -> None:
    made_up.broken(tmp_path)
    garbage = read_brief(tmp_path / "runs/garbage")
    for name in ("run.json", "summary.json", "plan.json"):
        assert any(name in problem for problem in garbage.problems), name
    half = read_brief(tmp_path / "runs/half")
    assert not half.finished and half.total_steps == 60 and not half.problems
    log = read_metrics(tmp_path / "runs/half")
    assert [row["step"] for row in log.rows] == list(range(1, 13))
    assert log.partial and log.damaged == 0 and log.problem == ""


def test_damaged_lines_are_counted_and_the_others_kept(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r", steps=5)
    path = tmp_path / "r/metrics.jsonl"
    path.write_text(path.read_text() + "???\n[1]\n" + json.dumps(made_up.row(6)) + "\n")
    log = read_metrics(tmp_path / "r")
    assert [row["step"] for row in log.rows] == [1, 2, 3, 4, 5, 6]
    assert log.damaged == 2 and "2" in log.problem and not log.partial


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r", steps=3000)
    log = read_metrics(tmp_path / "r", TAIL_BYTES)
    assert log.rows[-1]["step"] == 3000 and 50 < len(log.rows) < 1000 and log.problem == ""
    assert log.rows == read_metrics(tmp_path / "r").rows[-len(log.rows) :]


def test_a_sample_is_evenly_spaced_and_has_the_newest_row(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r", steps=3000)
    steps = [row["step"] for row in sample_metrics(tmp_path / "r", 32).rows]
    assert steps[-1] == 3000 and 30 <= len(steps) <= 33
    assert max(b - a for a, b in itertools.pairwise(steps)) < 150  # 3000 / 32 is 94
    made_up.run(tmp_path / "short", steps=20)
    assert sample_metrics(tmp_path / "short", 32) == read_metrics(tmp_path / "short")
    assert sample_metrics(tmp_path / "none", 32).rows == []


@pytest.mark.parametrize(
    "after",
    [
        "",
        '{"step": 7, "loss": 1.0}\n',
        '{"step": 7, "loss": 1.0}\n{"step": 8, "lo',
        '{"step": 5, "loss": 9.0}\n{"step": 6, "loss": 9.0}\n',  # repeated after a resume
        '???\n{"step": 7, "loss": 1.0}\n',
    ],
)
@pytest.mark.parametrize("before", ["", '{"step": 6, "lo'])
def test_the_new_part_of_a_log_is_read_as_the_whole(tmp_path: Path, before: str, after: str) -> None:
    """Before: the last line as it was when it was read first."""
    made_up.run(tmp_path / "r", steps=5)
    path = tmp_path / "r/metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + before)
    known = read_metrics(tmp_path / "r")
    path.write_text(whole + ('{"step": 6, "loss": 2.0}\n' if before else "") + after)
    assert read_new_metrics(tmp_path / "r", known) == read_metrics(tmp_path / "r")
    path.write_text(whole[: len(whole) // 2])
    assert read_new_metrics(tmp_path / "r", known) == read_metrics(tmp_path / "r")


def test_a_repeated_step_is_read_once_with_its_last_values(tmp_path: Path) -> None:
    rows = [{"step": 2, "loss": 5.0}, {"step": 1, "loss": 6.0}, {"step": 2, "loss": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path).rows] == [(1, 6.0), (2, 4.0)]


def test_missing_files_are_told_apart_from_damaged_ones(tmp_path: Path) -> None:
    assert read_object(tmp_path / "x.json") == ({}, MISSING) and read_metrics(tmp_path).error == MISSING
    for content in ("[1]", "{", '{"a": 1'):
        (tmp_path / "x.json").write_text(content)
        value, problem = read_object(tmp_path / "x.json")
        assert value == {} and problem not in ("", MISSING)


@pytest.mark.parametrize("finished", [True, False])
def test_read_brief_agrees_with_read_run(tmp_path: Path, finished: bool) -> None:
    made_up.run(tmp_path / "r", finished=finished)
    brief, whole = read_brief(tmp_path / "r"), read_run(tmp_path / "r")
    assert (brief.name, brief.config, brief.summary) == (whole.name, whole.config, whole.summary)
    assert (brief.finished, brief.precision, brief.emulated) == (
        whole.finished,
        whole.precision,
        whole.emulated,
    )
    assert brief.plan == ({} if finished else whole.plan) and brief.metrics == []


@given(st.binary(max_size=200), st.integers(0, 100) | st.none())
def test_any_bytes_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, tail: int | None
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for name in ("run.json", "summary.json", "plan.json", "environment.json", "metrics.jsonl", "events.log"):
        (folder / name).write_bytes(content)
    record, log = read_run(folder), read_metrics(folder, tail)
    assert isinstance(record.name, str) and read_brief(folder).config == {}
    steps = [number(row["step"]) for row in log.rows]
    assert steps == sorted(set(steps), key=lambda step: step or 0.0)


def test_the_lowest_value_of_a_metric_is_that_of_all_rows(tmp_path: Path) -> None:
    lines = [
        "{" + f'"step": {step}, "val_bpb": {value}, "val_bpb/en": 0.1' + "}"
        for step, value in enumerate(["1.5", "null", "1e0", "-0.0", "1e300", "NaN", "0.25.1", "2"])
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:3]) + '\n{"step": 9, "val_bpb": 0.0')
    assert (
        lowest_metric(tmp_path, "val_bpb")
        == 1.0
        == min(series(read_metrics(tmp_path).rows, "val_bpb", "step")[1])
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert lowest_metric(tmp_path, "val_bpb") == 0.0 and lowest_metric(tmp_path, "loss") is None
    assert lowest_metric(tmp_path / "none", "val_bpb") is None
