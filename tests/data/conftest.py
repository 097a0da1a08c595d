"""A small prepared data set with two languages, created once for all tests that only read it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from tests.data.data_corpus import make_corpus


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with several shards per split, so that tests cross shard boundaries."""
    folder = tmp_path_factory.mktemp("prepared")
    make_corpus(folder / "corpus.jsonl", 300)
    out = folder / "out"
    prepare(
        [str(folder / "corpus.jsonl")],
        out,
        CorpusOptions(vocab_size=400, val_fraction=0.1, workers=1, shard_bytes=60_000, quiet=True),
    )
    return out


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the data set that the test may damage."""
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"
