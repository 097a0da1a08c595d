from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.config.align import AlignConfig
from deskside.config.base import DATA_NOUNS
from deskside.data.reading import shards
from deskside.data.reading.shards import EncodedDocument, open_table, open_tokens, publish, write_shard
from deskside.utils.errors import RunError, UsageError


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


@given(
    documents=st.lists(
        st.tuples(st.lists(st.integers(1, 299), max_size=20), st.integers(0, 3)), min_size=1, max_size=20
    ),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
@settings(max_examples=60, deadline=None)
def test_write_shard_round_trip(
    tmp_path_factory: pytest.TempPathFactory, documents: list, dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    encoded = [EncodedDocument(np.array(ids, dtype=np.uint32), tag) for ids, tag in documents]
    token_bytes = np.arange(300, dtype=np.uint16)
    info = write_shard(
        folder, "x", encoded, eos_id=0, dtype=dtype, text_bytes=7, token_bytes=token_bytes, key="k"
    )
    # They are recorded before they are published.
    assert not {"x.bin", "x.idx.npy"} & {p.name for p in folder.iterdir()}
    publish(folder, info)
    expected = [0]
    starts = []
    for ids, _ in documents:
        starts.append(len(expected) - 1)
        expected += [*ids, 0]
    raw = np.frombuffer((folder / "x.bin").read_bytes(), dtype="<u2" if dtype == "uint16" else "<u4")
    assert raw.tolist() == expected == open_tokens(folder, info, dtype).tolist()
    table = open_table(folder, info)
    assert table["start"].tolist() == starts and table["tag"].tolist() == [t for _, t in documents]
    assert info.checksum == xxhash.xxh3_128_hexdigest((folder / "x.bin").read_bytes())
    assert info.token_text_bytes == sum(sum(ids) for ids, _ in documents)
    assert sum(c.documents for c in info.tags.values()) == len(documents)
    assert sum(c.tokens for c in info.tags.values()) == len(expected) - 1
    assert sorted(p.name for p in folder.iterdir()) == ["x.bin", "x.idx.npy"]


def test_dtype_follows_the_vocabulary() -> None:
    assert [shards.dtype_for(n) for n in (300, 65536, 65537)] == ["uint16", "uint16", "uint32"]


@pytest.mark.parametrize("suffix", [".bin", ".idx.npy"])
def test_one_flipped_bit_is_found_and_named(copy: Path, suffix: str) -> None:
    shards.check(copy)
    path = copy / f"train-00001{suffix}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert shards.verify(copy).damaged == {"train-00001.bin": f"train-00001{suffix} fails its checksum"}
    with pytest.raises(RunError, match=rf"train-00001{suffix} fails its checksum.*only damaged shards"):
        shards.check(copy)
    (copy / "prepare.json").unlink()  # as for conversations
    with pytest.raises(RunError, match=r"fails its checksum\. Remove this folder"):
        shards.check(copy)


def test_sizes_are_checked_at_every_opening(copy: Path) -> None:
    path = copy / "train-00000.bin"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(RunError, match=r"train-00000\.bin has \d+ bytes"):
        shards.check(copy)
    path.unlink()
    with pytest.raises(RunError, match=r"train-00000\.bin is missing"):
        shards.check(copy)


def test_stamp_avoids_a_second_verification(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / shards.STAMP).unlink(missing_ok=True)
    read: list[str] = []
    real = shards.fingerprint
    monkeypatch.setattr(shards, "fingerprint", lambda path: read.append(path.name) or real(path))
    shards.check(copy)
    assert "train-00000.bin" in read
    read.clear()
    shards.check(copy)
    assert read == []
    os.utime(copy / "train-00000.bin", (1, 1))
    shards.check(copy)
    assert "train-00000.bin" in read


def test_wrong_directories_and_indexes(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a prepared data set"):
        shards.read_index(tmp_path)
    index = json.loads((copy / "index.json").read_text())
    (copy / "index.json").write_text(json.dumps({**index, "schema_version": 99}))
    with pytest.raises(RunError, match="schema version 99"):
        shards.read_index(copy)
    for kind in {c.data_kind for c in get_args(get_args(AlignConfig)[0])} - {"conversations"}:
        (copy / "index.json").write_text(json.dumps({"schema_version": 1, "kind": kind, "splits": {}}))
        with pytest.raises(UsageError, match=f"holds {DATA_NOUNS[kind]}, not text"):
            shards.read_index(copy)
    for text in ("{", "[]", json.dumps({**index, "splits": 3})):
        (copy / "index.json").write_text(text)
        with pytest.raises(RunError, match="damaged index"):
            shards.read_index(copy)
    (copy / "index.json").unlink()
    with pytest.raises(UsageError, match="not finished: run the same"):
        shards.read_index(copy)
