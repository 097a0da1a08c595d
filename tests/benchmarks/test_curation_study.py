"""The data sets and the study that measure whether curation lowers the loss."""

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import curation_study
from benchmarks.curate import jaccard, shingles
from deskside.study.spec.expand import expand
from deskside.study.spec.parse_spec import load


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty training documents of random words, and two for validation."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for name, count in (("train", 20), ("val", 2)):
        texts = [" ".join(f"word{rng.randrange(1000)}" for _ in range(200)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def test_dirt_is_what_it_is_called(corpus: Path) -> None:
    texts = curation_study.texts_of([str(corpus / "train.jsonl")])
    options = argparse.Namespace(share=0.1, copies=3)
    made = list(curation_study.dirty(texts, options, random.Random(0)))
    assert Counter(kind for kind, _ in made) == {"original": 20, "exact": 6, "near": 6, "repeats": 2}
    for kind, text in made[20:]:
        assert (text in texts) == (kind == "exact")
        if kind == "near":
            assert max(jaccard(shingles(text), shingles(one)) for one in texts) > 0.7


@pytest.mark.full
def test_the_study_compares_the_steps_at_equal_tokens(corpus: Path, tmp_path: Path) -> None:
    arguments = [
        str(corpus / "train.jsonl"),
        "--val",
        str(corpus / "val.jsonl"),
        "--out",
        str(tmp_path / "out"),
    ]
    arguments += ["--share", "0.1", "--copies", "3", "--vocab-size", "300", "--base", "demo", "--seeds", "1"]
    assert curation_study.main(arguments) == 0
    index = {
        path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/index.json")
    }
    documents = {name: one["splits"]["train"]["documents"] for name, one in index.items()}
    assert documents == {"clean": 20, "raw": 34, "exact": 28, "near": 22, "quality": 20}
    assert len({json.dumps(one["splits"]["val"]["shards"]) for one in index.values()}) == 1
    arms = expand(load(str(tmp_path / "out/study.toml"))).arms
    assert {Path(arm.config.data.path).name for arm in arms} == set(documents)
    smallest = min(one["splits"]["train"]["tokens"] for one in index.values())
    assert {str(arm.config.schedule.length) for arm in arms} == {f"{smallest} tokens"}
