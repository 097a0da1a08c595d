"""Files are replaced as a whole or not at all, whichever file operation fails."""

import errno
import json
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from deskside.utils.errors import RunError
from deskside.utils.files import append_line, clear_temporary, write_atomically, write_json


def test_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "old")

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(RunError, match=r"plan\.json: cannot be written: No space left on device"):
                write_atomically(path, "new")
        assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_full_disk_leaves_no_file_with_the_final_name(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"x\.bin: .*No space left.* MiB free.*same command again"):
        write_atomically(tmp_path / "x.bin", fail)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_byte_of_a_file_name_becomes_an_escape(tmp_path: Path) -> None:
    value = {"name": b"caf\xe9-\xe0\xa4\x95.txt".decode("utf-8", "surrogateescape")}
    write_json(tmp_path / "x.json", value)
    data = (tmp_path / "x.json").read_bytes()
    assert json.loads(data) == value and "क".encode() in data


def test_an_error_names_the_file_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"input\.json: No such file"):
        write_atomically(tmp_path / "new.json", lambda _: (tmp_path / "other/input.json").read_bytes())
    with pytest.raises(RunError, match=r"gone/new\.json: cannot be written: No such file"):
        write_atomically(tmp_path / "gone/new.json", "x")
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_a_killed_process_are_deleted_and_no_others(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # as if killed: no clean-up

        def interrupted(file: BinaryIO) -> None:
            raise KeyboardInterrupt

        write_atomically(tmp_path / "a.json", interrupted)
    (tmp_path / "mine.tmp").write_text("not deskside's")
    assert len(list(tmp_path.iterdir())) == 2
    clear_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tmp"]


def test_partially_written_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, "one")

    class FullDiskFile:
        """A file on a disk with three bytes of free space."""

        def __init__(self) -> None:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in __exit__

        def __enter__(self) -> "FullDiskFile":
            return self

        def __exit__(self, *args: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int | None:
            return self.file.write(data[:3])

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *a, **k: FullDiskFile())
        with pytest.raises(RunError, match=r"cannot be written: No space left.*free some space"):
            append_line(path, "two and more")
    assert path.read_text() == "one\n"
    with pytest.raises(RunError, match="cannot be written: Is a directory"):
        append_line(tmp_path, "one")
