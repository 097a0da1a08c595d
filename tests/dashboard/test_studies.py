"""Reading studies and runs in every possible state."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.dashboard import file_cache, studies
from deskside.dashboard.scan import scan
from deskside.run.record import machine_name, read_brief
from tests.dashboard import made_up

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def test_a_study_is_what_was_written(tmp_path: Path) -> None:
    whole = made_up.study(tmp_path / "s")
    study = studies.read_study(tmp_path / "s")
    assert study is not None and study.results == whole and study.problem == ""


def test_studies_that_cannot_be_read_keep_their_place_with_the_reason(tmp_path: Path) -> None:
    made_up.broken(tmp_path)
    found = {path.name: studies.read_study(path) for path in scan(tmp_path).studies}
    assert found["elsewhere"] is None  # a results.json of another program
    for name, reason in (
        ("broken", "cannot be read"),
        ("odd", "is damaged"),
        ("begun", "no trial has started"),
    ):
        study = found[name]
        assert study is not None and study.results is None and reason in study.problem


def test_a_run_that_ended(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r")
    brief = read_brief(tmp_path / "r")
    assert brief.finished and not brief.problems and not brief.emulated
    assert machine_name(brief.environment) == "a card that was made up"
    assert brief.summary["tokens_per_second"] == 131072.0


@given(run=JSON, summary=JSON, plan=JSON, environment=JSON)
def test_no_json_breaks_the_run_table(
    run: object, summary: object, plan: object, environment: object
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r"
        path.mkdir()
        values = {"run": run, "summary": summary, "plan": plan, "environment": environment}
        for name, value in values.items():
            (path / f"{name}.json").write_text(json.dumps(value))
        (row,) = file_cache.rows(scan(Path(folder)), Path(folder))
        assert row.name == "r"


def test_the_whole_curve_and_what_is_missing_of_it(tmp_path: Path) -> None:
    made_up.broken(tmp_path)
    rows, missing = studies.read_curve(tmp_path / "runs/half")
    assert len(rows) == 12 and rows[0]["loss"] == pytest.approx(7.0)
    assert any("incomplete" in sentence for sentence in missing)
