"""Defaults of a run's configuration that depend on several of its parts."""

from typing import Any

import pytest

from deskside.config.run import RunConfig

ADAMW = {"optim": {"name": "adamw"}}


@pytest.mark.parametrize(
    ("given", "std"),
    [
        ({}, 0.02),
        ({"optim": {"name": "muon"}}, 0.02),
        (ADAMW, 1.0),
        ({"optim": {"name": "adamw", "scale": False}}, 0.02),
        ({**ADAMW, "model": {"embedding_multiplier": 8.0}}, 0.125),
        ({**ADAMW, "model": {"initializer_range": 0.02}}, 0.02),
        ({**ADAMW, "model": {"tie_word_embeddings": True}}, 0.02),
        ({**ADAMW, "schedule": {"name": "wsd", "tied_until": 0.5}}, 0.02),
    ],
)
def test_the_stream_begins_with_a_standard_deviation_of_one_under_adamw(
    given: dict[str, Any], std: float
) -> None:
    config = RunConfig.model_validate({"data": {"path": "data"}, **given})
    assert config.embedding_std() == std
    assert RunConfig.model_validate(config.model_dump()) == config
