"""Pairs and questions that several processes prepare."""

from pathlib import Path
from typing import Any

import pytest

from deskside.align.grpo_data import prepare_questions
from deskside.align.preference_data import prepare_pairs
from deskside.align.prepared import FolderSpec
from deskside.data.corpus import process_pool
from tests.align import tiny
from tests.data import chat_tokenizer


@pytest.mark.parametrize("kind", ["preference", pytest.param("questions", marks=pytest.mark.full)])
def test_the_same_from_one_process_and_from_several(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last byte, with one that cannot be used."""
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    rows = [{**pair, "answer": n} for n, pair in enumerate(tiny.pairs(60))]
    rows.insert(30, {**rows[0], "prompt": 7})
    spec = FolderSpec(kind, (str(tiny.jsonl(tmp_path / "a.jsonl", rows)),), val_fraction=0.2)
    found = []
    for count in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(process_pool, "cpu_cores", lambda count=count: count)
            patch.setattr(process_pool, "MIN_PARALLEL_ITEMS", 8)
            patch.setattr(process_pool, "ITEMS_PER_TASK", 4)
            out = tmp_path / str(count)
            if kind == "preference":
                index = prepare_pairs(spec, tokenizer, out)
            else:
                index = prepare_questions(spec, "Be brief.", tokenizer, out)
        (left,) = index["left_out"].values()
        assert left["count"] == 1 and "a.jsonl:31" in left["first"][0]
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1] and len(found[0]) >= 7
