"""`deskside runs`: the list of runs, studies and searches, and runs beside each other."""

import json
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.main import main
from tests.dashboard import made_up


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def made(here: Path) -> Path:
    made_up.run(here / "runs/first")
    made_up.run(here / "runs/second", seed=2, val_bpb=1.0)
    made_up.run(here / "runs/half", steps=20, finished=False)
    made_up.study(here / "studies/made")
    made_up.run(here / "studies/made/runs/trial-s1")
    made_up.search(here / "searches/made")
    return here


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the JSON that a command prints."""
    assert main(["runs", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_everything_below_a_directory_is_listed(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in printed([], capsys)}
    assert set(rows) == {"runs/first", "runs/second", "runs/half", "studies/made", "searches/made"}
    assert rows["runs/second"]["bpb"] == 1.0 and rows["runs/half"]["progress"] == pytest.approx(1 / 3)
    assert rows["runs/half"]["status"] != "finished"
    assert [row["created"] for row in rows.values()] == sorted(
        (row["created"] for row in rows.values()), reverse=True
    )
    assert "studies/made/runs/trial-s1" in {row["name"] for row in printed(["--trials"], capsys)}
    assert len(printed(["--limit", "2"], capsys)) == 2
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines()) and "1.0000" in shown


def test_runs_are_compared(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["runs/first", "runs/second"]
    result = printed(names, capsys)
    assert [row["name"] for row in result["runs"]] == names
    assert result["options"] == [{"option": "seed", "runs/first": "1", "runs/second": "2"}]
    assert main(["runs", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == names
    assert ["seed", "1", "2"] in [line.split() for line in lines]


def test_runs_of_one_name_in_two_directories(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up.run(made / "elsewhere/first", seed=3)
    names = [str(made / "runs/first"), str(made / "elsewhere/first")]
    result = printed(names, capsys)
    assert [row["name"] for row in result["runs"]] == names
    assert result["options"] == [{"option": "seed", names[0]: "1", names[1]: "3"}]


def test_one_run_has_all_options(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = printed(["runs/first"], capsys)["options"]
    assert {"option": "optim.name", "runs/first": "muon"} in options


def test_runs_scored_on_different_parts_of_the_text(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up.run(made / "runs/short", val_share=0.06)
    rows = printed(["runs/first", "runs/short"], capsys)["runs"]
    assert [row["val_share"] for row in rows] == [1.0, 0.06]
    assert main(["runs", "runs/first", "runs/short"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all", "6", "%"] in [line[-3:] for line in lines] and ["same", "part"] in [
        line[i : i + 2] for line in lines for i in range(len(line))
    ]
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.count("*") == 2  # in its row and below the table
    assert main(["runs", "runs/first", "runs/second"]) == 0
    assert "all" not in capsys.readouterr().out.split()


@pytest.mark.parametrize("logged", [True, False])
def test_a_fine_tuned_run_shows_the_result_at_its_end(
    logged: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up.run(here / "tuned", val_bpb=None, val_accuracy=0.875)
    metrics = here / "tuned/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("val_bpb", "val_accuracy" if logged else "other"))
    assert main(["runs", "tuned"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["held-out", "accuracy", "87.5", "%"] in lines


def test_damaged_files_are_not_compared(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["runs/first", "runs/second", "runs/third"]
    made_up.run(made / "runs/third", seed=3)
    (made / "runs/second/run.json").write_text("{")
    (made / "runs/third/summary.json").write_text("{")
    result = printed(names, capsys)
    assert result["options"] == [{"option": "seed", "runs/first": "1", "runs/third": "3"}]
    assert [row["status"] for row in result["runs"]] == ["finished", "finished", "damaged"]
    assert main(["runs", *names[:2]]) == 0
    assert "(none)" not in capsys.readouterr().out


def test_no_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed([], capsys) == []
    assert main(["runs"]) == 0
    assert "deskside go" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gone"], "gone: no such directory"),
        (["file"], "file: is a file"),
        (["runs/first", "runs"], "runs: is not the directory of a run"),
        (["runs/first", "studies/made"], "studies/made: is not the directory of a run"),
        (["--limit", "-1"], "--limit: -1"),
    ],
)
def test_wrong_usage(made: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main(["runs", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"deskside: {said}") and shown.err.count("\n") == 1
