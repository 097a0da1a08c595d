"""The run directory: its name, its JSON files, and the rows of metrics.jsonl."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.config.optim import AdamWConfig
from deskside.config.run import RunConfig
from deskside.run import directory
from deskside.run.directory import RunDirectory
from deskside.train.prepare.step_planning import recorded_plan
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import append_line

ROWS = st.lists(
    st.dictionaries(
        st.text(max_size=5),
        st.floats() | st.integers(-(2**64) + 1, 2**64 - 1) | st.none() | st.booleans(),
        max_size=4,
    ),
    max_size=20,
)


def test_given_name_must_be_unused_and_default_gets_a_number(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path, "mine", "demo").path.name == "mine"
    with pytest.raises(UsageError, match="mine exists; choose another --name"):
        RunDirectory.create(tmp_path, "mine", "demo")
    names = [RunDirectory.create(tmp_path, None, "demo").path.name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b"])
def test_names_that_are_not_plain_folder_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="plain folder name"):
        RunDirectory.create(tmp_path, name, "demo")


def test_runs_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^--runs .*file: is a file"):
        RunDirectory.create(tmp_path / "file", None, "demo")
    with pytest.raises(RunError, match=r"cannot be created: File name too long"):
        RunDirectory.create(tmp_path, "n" * 300, "demo")


def test_folder_without_run_json_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run \(no run\.json\)"):
        RunDirectory.open(tmp_path)


def test_the_name_alone_is_answered_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"did you mean runs/mine\?"):
        RunDirectory.open(Path("mine"))


@given(rows=ROWS)
def test_rows_come_back_and_are_strict_json(
    rows: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    rows = [{**row, "step": step} for step, row in enumerate(rows)]
    for row in rows:
        run.append_metrics(row)

    def expected(value: object) -> object:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    assert list(run.read_metrics()) == [{k: expected(v) for k, v in row.items()} for row in rows]
    if rows:
        for line in run.metrics.read_text("utf-8").splitlines():
            json.loads(line, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    "line", ["[]", "3", "{}", '{"step": "2"}', '{"step": 2.5}', '{"step": true}', "[" * 9000]
)
def test_damaged_row_raises_run_error(line: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics({"step": 1})
    append_line(run.metrics, line)
    before = run.metrics.read_bytes()
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 2 is damaged .*; delete that line and resume"):
        run.cut_metrics(1)
    assert run.metrics.read_bytes() == before


def test_cut_metrics_drops_later_and_half_written_rows(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.cut_metrics(3) == 0
    for step in range(1, 8):
        run.append_metrics({"step": step})
    with run.metrics.open("a") as file:
        file.write('{"step": 8')
    assert run.cut_metrics(5) == 2
    assert [r["step"] for r in run.read_metrics()] == [1, 2, 3, 4, 5]
    run.append_metrics({"step": 6})
    assert [r["step"] for r in run.read_metrics()] == [1, 2, 3, 4, 5, 6]


def test_failing_fsync_raises_run_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.sync_metrics()  # nothing there yet
    run.append_metrics({"step": 1})

    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written: Input/output error"):
        run.sync_metrics()


@pytest.mark.parametrize("content", ["", "{", "\xff"])
def test_damaged_or_missing_json_raises_run_error(content: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(RunError, match=r"plan\.json: is missing"):
        run.read_json("plan.json")
    (tmp_path / "plan.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"plan\.json: is damaged"):
        run.read_json("plan.json")
    run.write_json("plan.json", {"a": 1})
    assert run.read_json("plan.json") == {"a": 1}
    assert directory.RunDirectory(tmp_path).metrics == tmp_path / "metrics.jsonl"


@pytest.mark.parametrize(
    "damage", ['{"revisions": 3}', "[]", "{}", '{"revisions": [{"step": "x"}]}', "[" * 5000]
)
def test_invalid_plan_raises_run_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "plan.json").write_text(damage)
    with pytest.raises(RunError, match=r"plan\.json: is damaged"):
        recorded_plan(RunDirectory(tmp_path))


@pytest.mark.parametrize("damage", ["{}", '{"config": 3}', '{"config": {"seed": -1}}'])
def test_invalid_configuration_raises_run_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "run.json").write_text(damage)
    with pytest.raises(RunError, match=r"run\.json: has no valid run configuration"):
        RunDirectory.open(tmp_path).config()


def test_a_run_that_is_older_than_an_option_keeps_its_rates(tmp_path: Path) -> None:
    now = RunConfig(optim=AdamWConfig()).model_dump(mode="json")
    old = {**now, "optim": {k: v for k, v in now["optim"].items() if k not in ("embedding_lr", "head_lr")}}
    for config, rates in ((now, (0.1, 0.008)), (old, (None, None))):
        (tmp_path / "run.json").write_text(
            json.dumps({"config": config, "schema_version": 1, "directory": "."})
        )
        optim = RunDirectory.open(tmp_path).config().optim
        assert isinstance(optim, AdamWConfig) and (optim.embedding_lr, optim.head_lr) == rates


@pytest.mark.parametrize("version", [None, 2, "1"])
def test_other_schema_version_raises_run_error(tmp_path: Path, version: object) -> None:
    run = {"config": RunConfig().model_dump(mode="json"), "schema_version": version}
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(RunError, match=r"run\.json: has schema version"):
        RunDirectory.open(tmp_path).config()


def test_summary_with_nan_is_strict_json(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_json("summary.json", {"val_bpb": math.nan, "best": {"at": [math.inf, 1.5]}})
    text = (tmp_path / "summary.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert run.read_json("summary.json") == {"val_bpb": None, "best": {"at": [None, 1.5]}}
