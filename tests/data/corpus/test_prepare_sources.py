"""A run's data is prepared from `data.sources` as its configuration says, once."""

from pathlib import Path
from typing import Any

import pytest

from deskside.config.run import RunConfig
from deskside.data.corpus.prepare_sources import prepare_sources
from deskside.data.reading.index import read_index
from tests.data.data_corpus import make_corpus
from tests.train import tiny_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    make_corpus(tmp_path / "corpus.jsonl", 60)
    data: dict[str, Any] = {"sources": [str(tmp_path / "corpus.jsonl")], "val_fraction": 0.2}
    return tiny_run.config(tmp_path / "out", data=data, seed=7)


def test_the_configuration_determines_the_data(config: RunConfig, tmp_path: Path) -> None:
    said: list[str] = []
    prepare_sources(config, said.append)
    index = read_index(tmp_path / "out")
    given = {name: index.arguments[name] for name in ("vocab_size", "val_fraction", "seed")}
    assert given == {"vocab_size": config.model.vocab_size, "val_fraction": 0.2, "seed": 7}
    assert len(said) == 1
    prepare_sources(config.model_copy(update={"seed": 8}), said.append)
    assert len(said) == 1 and read_index(tmp_path / "out") == index


def test_a_run_without_sources_prepares_nothing(config: RunConfig, tmp_path: Path) -> None:
    data = config.data.model_copy(update={"sources": ()})
    prepare_sources(config.model_copy(update={"data": data}), pytest.fail)
    assert not (tmp_path / "out").exists()
