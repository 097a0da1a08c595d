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
    assert config.model.initializer_range == std
    assert RunConfig.model_validate(config.model_dump()) == config


def test_a_default_of_one_optimizer_does_not_stay_with_another() -> None:
    given = RunConfig.model_validate({"data": {"path": "data"}, **ADAMW}).model_dump(exclude_unset=True)
    assert RunConfig.model_validate(given).model.initializer_range == 1.0
    assert RunConfig.model_validate({**given, "optim": {"name": "muon"}}).model.initializer_range == 0.02
