from __future__ import annotations

import os
from pathlib import Path

import pytest

from deskside.data.reading.verify import STAMP, checked_index, verify
from deskside.utils import files
from deskside.utils.errors import RunError


@pytest.mark.parametrize("suffix", [".bin", ".idx.npy"])
def test_one_flipped_bit_is_found_and_named(copy: Path, suffix: str) -> None:
    checked_index(copy)
    path = copy / f"train-00001{suffix}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert verify(copy).damaged == {"train-00001.bin": f"train-00001{suffix} fails its checksum"}
    with pytest.raises(RunError, match=rf"train-00001{suffix} fails its checksum.*only damaged shards"):
        checked_index(copy)
    (copy / "prepare.json").unlink()  # as for conversations
    with pytest.raises(RunError, match=r"fails its checksum\. Remove this folder"):
        checked_index(copy)


def test_sizes_are_checked_at_every_opening(copy: Path) -> None:
    path = copy / "train-00000.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(RunError, match=r"train-00000\.bin has \d+ bytes"):
        checked_index(copy)
    path.unlink()
    with pytest.raises(RunError, match=r"train-00000\.bin is missing"):
        checked_index(copy)


def test_stamp_avoids_a_second_verification(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / STAMP).unlink(missing_ok=True)
    read: list[str] = []
    real = files.fingerprint
    monkeypatch.setattr(
        "deskside.data.reading.verify.fingerprint", lambda path: read.append(path.name) or real(path)
    )
    checked_index(copy)
    assert "train-00000.bin" in read
    read.clear()
    checked_index(copy)
    assert read == []
    os.utime(copy / "train-00000.bin", (1, 1))
    checked_index(copy)
    assert "train-00000.bin" in read
