"""A changed file is always noticed, and a file that is only copied or touched is not taken for a changed one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deskside.data.corpus import source_files
from deskside.data.corpus.source_files import FileRecord, first_change, record_files
from deskside.data.corpus.sources import Source
from deskside.utils.files import fingerprint, write_json
from deskside.utils.parsing import json_value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"text/{name}.txt").write_text(f"the text of {name}")
    return tmp_path / "text"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read."""
    names: list[str] = []
    monkeypatch.setattr(
        source_files, "fingerprint", lambda path: names.append(path.name) or fingerprint(path)
    )
    return names


def record(folder: Path, known: list[FileRecord] | None = None) -> list[FileRecord]:
    return record_files([Source.parse(str(folder))], known or ())


def test_only_files_with_other_times_are_read_again(folder: Path, read: list[str]) -> None:
    first = record(folder)
    assert read == ["a.txt", "b.txt"] and first[1].checksum == fingerprint(folder / "b.txt")[1]
    assert record(folder, first) == first and len(read) == 2
    os.utime(folder / "b.txt", (1, 1))
    touched = record(folder, first)
    assert read[2:] == ["b.txt"] and touched != first and not first_change(first, touched)
    shutil.copytree(folder, folder.with_name("copy"))
    assert not first_change(first, record(folder.with_name("copy"), first)) and len(read) == 5


def test_another_text_of_the_same_size_and_time_is_a_change(folder: Path) -> None:
    first = record(folder)
    before = (folder / "b.txt").stat()
    (folder / "b.txt").write_text("the text of B")
    os.utime(folder / "b.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (folder / "b.txt").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert first_change(first, record(folder, first)) == "b.txt"


def test_a_file_that_comes_goes_or_becomes_readable_is_a_change(folder: Path) -> None:
    first = record(folder)
    missing = record_files([Source.parse(str(folder)), Source.parse(str(folder / "no.txt"))], first)
    assert (missing[2].size, missing[2].checksum) == (-1, "")
    assert first_change(first, missing) == first_change(missing, first) == "no.txt"
    (folder / "no.txt").write_text("now it is there")
    there = record_files([Source.parse(str(folder / "no.txt"))], missing[2:])
    assert first_change(missing[2:], there) == "no.txt"


def test_records_of_any_file_name_are_written_and_read_back(folder: Path) -> None:
    (folder / os.fsdecode(b"caf\xe9\n.txt")).write_text("x")
    records = record(folder)
    write_json(folder / "state.json", [entry.model_dump(mode="json") for entry in records])
    back = json_value((folder / "state.json").read_bytes())
    assert [FileRecord.model_validate(entry) for entry in back] == records == record(folder, records)
