"""The validation split represents every language, source and file, and a warning says when it is too small."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.corpus import heldout
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.heldout import (
    MIN_VALIDATION_BYTES,
    HoldoutPlanner,
    is_validation,
    text_hash,
    validation_warnings,
)
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.index import read_index
from tests.data.data_corpus import make_corpus

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {"vocab_size": 300, "workers": 1, "quiet": True}


def languages(out: Path, split: str) -> set[tuple[str, str]]:
    index = read_index(out)
    tags = {tag for shard in index.splits[split].shards for tag in shard.tags}
    return {(index.tags[tag].source, index.tags[tag].lang) for tag in tags}


def test_480_documents_of_many_languages(tmp_path: Path) -> None:
    """Half a percent of this corpus would be a single document, too few for validation."""
    rng = random.Random(0)
    words = [f"w{i}" for i in range(300)]
    records = [
        {"text": " ".join(rng.choices(words, k=400)), "lang": f"l{i % 7}", "source": f"s{i % 3}"}
        for i in range(479)
    ]
    records.append({"text": "the only one of its kind " * 20, "lang": "rare", "source": "s0"})
    records.append({"text": "one of two " * 30, "lang": "two", "source": "s0"})
    records.append({"text": "two of two " * 30, "lang": "two", "source": "s1"})
    rng.shuffle(records)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    report = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", CorpusOptions(**SMALL))
    assert 0.05 < report.text_bytes["val"] / sum(report.text_bytes.values()) < 0.2
    assert {lang for _, lang in languages(tmp_path / "out", "val")} == {f"l{i}" for i in range(7)} | {"two"}
    assert {source for source, _ in languages(tmp_path / "out", "val")} == {"s0", "s1", "s2"}
    assert [w for w in report.warnings if "rare" in w] == report.warnings
    # A given share is used, apart from documents that represent a language. A warning says that it is too small.
    smallest = prepare(
        [str(tmp_path / "a.jsonl")], tmp_path / "least", CorpusOptions(val_fraction=1e-9, **SMALL)
    )
    assert 8 <= smallest.documents["val"] <= 11 and "less than 50 kB" in smallest.warnings[0]
    assert languages(tmp_path / "least", "train") >= {("s0", "rare")}


def test_every_file_is_represented_and_order_does_not_matter(tmp_path: Path) -> None:
    for i in range(4):
        make_corpus(tmp_path / f"{i}.jsonl", 30, seed=i)
    names = [str(tmp_path / f"{i}.jsonl") for i in range(4)]
    found = []
    for order, out in ((names, "a"), (names[::-1], "b")):
        prepare(order, tmp_path / out, CorpusOptions(val_fraction=1e-9, tokenizer=None, **SMALL))
        found.append(read_index(tmp_path / out).splits["val"])
    assert found[0].documents == found[1].documents >= 4 and found[0].text_bytes == found[1].text_bytes


def plan(documents: list[bytes], fraction: float | None = None, **given: Any) -> heldout.Holdout:
    planner = HoldoutPlanner(0, fraction)
    for document in documents:
        planner.add(document, text_hash(document), given.get("labels", ()))
    return planner.plan()


def test_default_size() -> None:
    """Half a megabyte, but at most a tenth and at least half a percent of the text."""
    for size, share in ((1000, 0.1), (50_000, 0.1), (200_000, 500_000 / 20_000_000), (10_000_000, 0.005)):
        planner = HoldoutPlanner(0, None)
        for i in range(100):
            planner.add(b"%d" % i, text_hash(b"%d" % i), ())
        planner.size = 100 * size
        assert planner.plan().share == pytest.approx(share)


@given(st.lists(st.integers(0, 40), min_size=12, max_size=60), st.lists(st.integers(41, 99), max_size=30))
@settings(max_examples=100, deadline=None)
def test_the_hash_moves_no_document_to_validation_when_sources_are_added(
    first: list[int], more: list[int]
) -> None:

    def chosen(numbers: list[int]) -> set[int]:
        planner = HoldoutPlanner(0, None)
        for n in numbers:
            text = b"document %d " % n * 200
            planner.add(text, text_hash(text), ())
        holdout = planner.plan()
        if holdout.tails:
            return set(numbers)
        return {n for n in numbers if is_validation(text_hash(b"document %d " % n * 200), 0, holdout.share)}

    assert chosen(first + more) & set(first) <= chosen(first)


def test_a_long_document_gives_its_last_million_bytes() -> None:
    long = b"a line of a book\n" * 200_000
    documents = [b"%d" % i for i in range(20)]
    holdout = plan([long, *documents], 0.9999)
    cut = holdout.validation_start(long, text_hash(long))
    assert 900_000 < len(long) - cut <= 1_000_000 and long[cut:].startswith(b"a line")
    assert holdout.validation_start(documents[0], text_hash(documents[0])) == 0


@given(st.text(alphabet=" \n\t\x1cab\u00a0\u3000é", max_size=60), st.booleans())
@settings(max_examples=200, deadline=None)
def test_hash_ignores_white_space_at_the_ends(text: str, long: bool) -> None:
    inside = "x" + text + "y" * (9000 if long else 1)
    assert text_hash((text + inside + text).encode()) == text_hash((text + inside + text).strip().encode())
    assert text_hash((" \u3000" + inside + "\n").encode()) == text_hash(inside.encode())


def test_only_the_size_of_the_validation_text_gives_a_warning(prepared: Path) -> None:
    index = read_index(prepared)

    def warnings(size: int, documents: int, training: int) -> list[str]:
        splits = dict(index.splits)
        splits["val"] = splits["val"].model_copy(update={"text_bytes": size, "documents": documents})
        splits["train"] = splits["train"].model_copy(update={"documents": training})
        return validation_warnings(index.model_copy(update={"splits": splits}))

    for documents, training in ((1, 20), (2, 273), (500, 5000)):
        assert warnings(MIN_VALIDATION_BYTES, documents, training) == []
        (line,) = warnings(MIN_VALIDATION_BYTES - 1, documents, training)
        assert "49,999 bytes" in line and "less than 50 kB" in line
    assert validation_warnings(index.model_copy(update={"splits": {"train": index.splits["train"]}})) == []


def test_the_guide_names_the_size_that_gives_a_warning() -> None:
    guide = (ROOT / "docs" / "guides" / "own-text.md").read_text("utf-8")
    assert f"If less than {MIN_VALIDATION_BYTES // 1000} kB" in " ".join(guide.split())
