"""Studies and runs are found by the names of a directory's files."""

import os
from pathlib import Path

from deskside.dashboard import scan as scanning
from deskside.dashboard.scan import scan, stamp
from tests.dashboard import made_up


def test_finds_studies_their_runs_and_runs_of_their_own(tmp_path: Path) -> None:
    made_up.study(tmp_path / "studies/a")
    made_up.run(tmp_path / "studies/a/runs/x-s1")
    made_up.run(tmp_path / "runs/own")
    made_up.run(tmp_path / "runs/own/checkpoints/step-1")  # a directory inside a run is not a run
    found = scan(tmp_path)
    assert found.studies == (tmp_path / "studies/a",)
    assert [(run.path.name, run.study) for run in found.runs] == [
        ("own", None),
        ("x-s1", tmp_path / "studies/a"),
    ]
    assert [run.path.name for run in found.standalone_runs] == ["own"]
    assert found.problems == ()


def test_the_directory_itself_may_be_a_run_or_a_study(tmp_path: Path) -> None:
    made_up.run(tmp_path / "one")
    made_up.study(tmp_path / "many")
    assert scan(tmp_path / "one").runs[0].path == tmp_path / "one"
    assert scan(tmp_path / "many").studies == (tmp_path / "many",)


def test_depth_is_bounded(tmp_path: Path) -> None:
    made_up.run(tmp_path / "a/b/c")
    assert len(scan(tmp_path, max_depth=3).runs) == 1
    assert scan(tmp_path, max_depth=2).runs == ()


def test_a_link_is_followed_and_a_ring_of_links_ends(tmp_path: Path) -> None:
    made_up.run(tmp_path / "disk/run")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/runs").symlink_to(tmp_path / "disk")
    (tmp_path / "work/again").symlink_to(tmp_path / "work")
    (tmp_path / "work/gone").symlink_to(tmp_path / "nowhere")
    found = scan(tmp_path / "work")
    assert [run.path for run in found.runs] == [tmp_path / "work/runs/run"]


def test_a_search_that_is_too_large_says_so(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(scanning, "MAX_DIRECTORIES", 3)
    for number in range(6):
        (tmp_path / str(number)).mkdir()
    assert "more than 3 directories" in scan(tmp_path).problems[0][1]


def test_a_directory_that_is_gone_is_a_problem_and_no_error(tmp_path: Path) -> None:
    found = scan(tmp_path / "nowhere")
    assert found.runs == () and found.problems[0][1].startswith("cannot be listed")


def test_the_stamp_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert stamp(tmp_path, "a", "b") == (None, None)
    path.write_text("1")
    before = stamp(tmp_path, "a")
    path.write_text("22")
    assert stamp(tmp_path, "a") != before
    same = stamp(tmp_path, "a")
    os.utime(path, ns=(1, 1))
    assert stamp(tmp_path, "a") != same


def test_runs_of_a_documentation_are_found_only_in_it(tmp_path: Path) -> None:
    for folder in ("runs/mine", "docs/data/theirs", ".hidden/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "run.json").touch()
    assert [run.path for run in scan(tmp_path).runs] == [tmp_path / "runs/mine"]
    assert [run.path for run in scan(tmp_path / "docs").runs] == [tmp_path / "docs/data/theirs"]
