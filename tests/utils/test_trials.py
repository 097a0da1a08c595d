"""Cached results of trials: which are found again and when, damaged files, and concurrent processes."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from deskside.utils import trials
from deskside.utils.errors import UsageError
from deskside.utils.machine import this_machine
from deskside.utils.trials import NO_CACHE, TrialCache

SPEC = {"tokens": 2048, "window": None}
RESULT = {"name": "sdpa", "seconds": {"sdpa": 0.1 + 0.2}}


def only_file(cache: TrialCache) -> Path:
    assert cache.folder is not None
    (path,) = cache.folder.glob("*.json")
    return path


def test_a_result_is_found_by_its_kind_and_specification(tmp_path: Path) -> None:
    cache = TrialCache(tmp_path / "new" / "trials")
    assert cache.find("attention", SPEC) is None
    cache.keep("attention", SPEC, RESULT, 1.25)
    found = TrialCache(cache.folder).find("attention", SPEC)
    assert found is not None and found.result == RESULT and found.seconds == 1.25
    assert found.key["machine"] == this_machine().key()
    assert cache.find("tiles", SPEC) is None and cache.find("attention", {**SPEC, "window": 512}) is None
    cache.keep("attention", SPEC, {"name": "chunked"}, 1.0)
    assert [trial.result for trial in cache.trials()] == [{"name": "chunked"}]
    assert cache.clear() == 1 and cache.trials() == [] and cache.clear() == 0


@pytest.mark.parametrize("part", ["card", "driver", "power_limit_watts", "torch", "triton", "code"])
def test_a_result_of_another_machine_or_version_is_not_used(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TrialCache(tmp_path).keep("attention", SPEC, RESULT, 1.0)
    other = {**this_machine().key(), part: "another"}
    cache = TrialCache(tmp_path)
    monkeypatch.setitem(cache.__dict__, "machine", other)
    assert cache.find("attention", SPEC) is None
    cache.keep("attention", SPEC, {"name": "other"}, 1.0)
    kept = TrialCache(tmp_path).find("attention", SPEC)
    assert kept is not None and kept.result == RESULT and len(cache.trials()) == 2


@pytest.mark.parametrize(
    "damage", ["half", "empty", "list", "binary", "changed", "field missing", "other schema"]
)
def test_a_damaged_file_is_one_line_and_another_trial(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = TrialCache(tmp_path)
    cache.keep("attention", SPEC, RESULT, 1.0)
    path = only_file(cache)
    content: dict[str, Any] = json.loads(path.read_text())
    path.write_bytes(
        {
            "half": path.read_bytes()[:100],
            "empty": b"",
            "list": b"[]",
            "binary": b"\xff\x00\xfe",
            "changed": json.dumps({**content, "result": {"name": "flash"}}).encode(),
            "field missing": json.dumps({k: v for k, v in content.items() if k != "when"}).encode(),
            "other schema": json.dumps({**content, "schema": 99}).encode(),
        }[damage]
    )
    assert cache.find("attention", SPEC) is None and cache.trials() == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if damage == "other schema" else 1) and all(str(path) in line for line in lines)
    cache.keep("attention", SPEC, RESULT, 1.0)
    assert cache.find("attention", SPEC) is not None


def test_a_folder_that_cannot_be_written_costs_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = TrialCache(tmp_path / "file" / "trials")
    cache.keep("attention", SPEC, RESULT, 1.0)
    assert cache.find("attention", SPEC) is None and len(capsys.readouterr().err.splitlines()) == 1


def test_a_full_disk_leaves_the_old_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = TrialCache(tmp_path)
    cache.keep("attention", SPEC, RESULT, 1.0)

    def full(*given: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        cache.keep("attention", SPEC, {"name": "new"}, 1.0)
    kept = cache.find("attention", SPEC)
    assert kept is not None and kept.result == RESULT and len(capsys.readouterr().err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [only_file(cache).name]


def test_a_machine_that_cannot_be_identified_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown() -> None:
        raise UsageError("this machine has different GPUs")

    monkeypatch.setattr(trials, "this_machine", unknown)
    cache = TrialCache(tmp_path)
    for _ in range(2):
        cache.keep("attention", SPEC, RESULT, 1.0)
        assert cache.find("attention", SPEC) is None
    assert not list(tmp_path.iterdir()) and len(capsys.readouterr().err.splitlines()) == 1


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    NO_CACHE.keep("attention", SPEC, RESULT, 1.0)
    assert NO_CACHE.find("attention", SPEC) is None and NO_CACHE.trials() == [] and NO_CACHE.clear() == 0


def test_the_folder_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESKSIDE_CACHE", str(tmp_path / "a"))
    assert TrialCache().folder == tmp_path / "a" / "trials"
    monkeypatch.delenv("DESKSIDE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert TrialCache().folder == tmp_path / "b" / "deskside" / "trials"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert TrialCache().folder == tmp_path / "c" / ".cache" / "deskside" / "trials"


def _write_often(folder: Path, number: int) -> None:
    cache = TrialCache(folder)
    for round_ in range(40):
        cache.keep("attention", SPEC, {"name": "x" * 2000, "number": number, "round": round_}, 1.0)


def test_processes_that_write_at_once_never_leave_a_broken_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(tmp_path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    cache, seen = TrialCache(tmp_path), 0
    while any(writer.is_alive() for writer in writers):
        found = cache.find("attention", SPEC)
        assert found is not None or seen == 0
        seen += found is not None
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen > 0 and cache.find("attention", SPEC) is not None and len(list(tmp_path.iterdir())) == 1
