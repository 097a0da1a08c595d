"""Defaults of a run's configuration that depend on several of its parts."""

from typing import Any

import pytest

from deskside.config.run import RunConfig

ADAMW = {"optim": {"name": "adamw"}}


@pytest.mark.parametrize(
    ("given", "std"),
    [
        ({}, pytest.approx(12 * 0.04 * 8**-0.5)),  # 65,536 tokens per step, an eighth of the reference
        ({"optim": {"name": "muon", "scale": False, "lr": 0.01}}, pytest.approx(12 * 0.01)),
        ({"model": {"num_hidden_layers": 96}}, 1.0),
        ({"model": {"num_hidden_layers": 2}, "optim": {"name": "muon", "lr": 0.001}}, 0.02),
        (
            {"model": {"residual_multiplier": 0.5, "embedding_multiplier": 4.0}},
            pytest.approx(0.17 / 8, rel=0.01),
        ),
        ({"model": {"embedding_multiplier": 100.0}}, 0.02),
        (ADAMW, 1.0),
        ({"optim": {"name": "adamw", "scale": False}}, 0.02),
        ({**ADAMW, "model": {"embedding_multiplier": 8.0}}, 0.125),
        ({**ADAMW, "model": {"initializer_range": 0.02}}, 0.02),
        ({**ADAMW, "model": {"tie_word_embeddings": True}}, 0.02),
        ({**ADAMW, "schedule": {"name": "wsd", "tied_until": 0.5}}, 0.02),
    ],
)
def test_embeddings_begin_half_as_large_as_the_first_updates_of_the_blocks(
    given: dict[str, Any], std: float
) -> None:
    config = RunConfig.model_validate({"data": {"path": "data"}, **given})
    assert config.embedding_std() == std
    assert RunConfig.model_validate(config.model_dump()) == config
