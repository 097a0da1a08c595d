from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from deskside.config.align import AlignConfig
from deskside.config.base import DATA_NOUNS
from deskside.data.reading.index import dtype_for, read_index
from deskside.data.reading.index_file import INDEX
from deskside.utils.errors import RunError, UsageError


def test_dtype_follows_the_vocabulary() -> None:
    assert [dtype_for(n) for n in (300, 65536, 65537)] == ["uint16", "uint16", "uint32"]


def test_wrong_directories_and_indexes(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a prepared data set"):
        read_index(tmp_path)
    index = json.loads((copy / "index.json").read_text())
    (copy / "index.json").write_text(json.dumps({**index, "schema_version": 99}))
    with pytest.raises(RunError, match="schema version 99"):
        read_index(copy)
    for kind in {c.data_kind for c in get_args(get_args(AlignConfig)[0])} - {"conversations"}:
        (copy / "index.json").write_text(json.dumps({"schema_version": 1, "kind": kind, "splits": {}}))
        with pytest.raises(UsageError, match=f"holds {DATA_NOUNS[kind]}, not text"):
            read_index(copy)
    for text in ("{", "[]", json.dumps({**index, "splits": 3})):
        (copy / "index.json").write_text(text)
        with pytest.raises(RunError, match="damaged index"):
            read_index(copy)
    (copy / "index.json").unlink()
    with pytest.raises(UsageError, match="not finished: run the same"):
        read_index(copy)


@pytest.mark.parametrize("key", ["tokens", "documents", "text_bytes", "token_text_bytes"])
def test_totals_that_are_not_the_sums_over_the_shards_are_damage(copy: Path, key: str) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["splits"]["val"][key] += 1
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(RunError, match=rf"splits\.val\.{key}"):
        read_index(copy)
