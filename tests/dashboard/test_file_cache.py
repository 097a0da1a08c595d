"""The cache of parsed files: each is read once, and read again when it changes."""

import json
import threading
import time
from pathlib import Path

import pytest

from deskside.dashboard import file_cache, studies
from deskside.run import record
from deskside.study.results import INTERRUPTED
from tests.dashboard import made_up


def test_two_who_ask_at_once_have_it_read_once() -> None:
    reads: list[str] = []

    def slow() -> str:
        reads.append("read")
        time.sleep(0.05)
        return "thing"

    kept = file_cache.Cache(8, threading.RLock())
    together = threading.Barrier(4)
    got: list[str] = []

    def ask() -> None:
        together.wait()
        got.append(kept.get("kind", "name", 1, slow))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["thing"] * 4 and reads == ["read"]
    assert kept.get("kind", "name", 2, lambda: "newer") == "newer"


def test_what_was_read_ahead_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up.study(tmp_path / "studies/made")
    made_up.broken(tmp_path)
    made_up.run(tmp_path / "runs/ended")
    file_cache.preload(tmp_path)

    def read_again(path: Path) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(record, "read_brief", read_again)
    monkeypatch.setattr(studies, "read_study", read_again)
    monkeypatch.setattr(file_cache, "scan", read_again)
    found = file_cache.scan_result(str(tmp_path))
    known = [study for path in found.studies if (study := file_cache.study(path)) is not None]
    assert [(study.path.name, study.results is not None) for study in known] == [
        ("begun", False),
        ("broken", False),
        ("made", True),
        ("odd", False),
    ]
    rows = file_cache.rows(found, tmp_path)
    assert {row.name for row in rows} >= {"runs/ended", "runs/garbage", "runs/half"}


def test_what_changes_after_it_was_read_ahead_is_read_again(tmp_path: Path) -> None:
    with made_up.running(tmp_path / "runs/now"):
        file_cache.preload(tmp_path)
        assert _status(tmp_path) == "running"
    made_up.old(tmp_path / "runs/now")
    assert _status(tmp_path) == INTERRUPTED
    (tmp_path / "runs/now/summary.json").write_text(json.dumps({"status": "finished", "val_bpb": 1.5}))
    assert _status(tmp_path) == "finished"
    assert file_cache.brief(tmp_path / "runs/now").summary["val_bpb"] == 1.5


def test_a_directory_is_listed_anew_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up.run(tmp_path / "a")
    assert len(file_cache.scan_result(str(tmp_path)).runs) == 1
    made_up.run(tmp_path / "b")
    assert len(file_cache.scan_result(str(tmp_path)).runs) == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + file_cache.SCAN_SECONDS)
    assert len(file_cache.scan_result(str(tmp_path)).runs) == 2


def _status(root: Path) -> str:
    (row,) = file_cache.rows(file_cache.scan_result(str(root)), root)
    return row.status
