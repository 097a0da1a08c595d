"""Sizes of published checkpoints give the number of parameters that was published with them."""

import pytest

from deskside.budget.shape import num_params
from deskside.weights.hf_families import FAMILIES
from deskside.weights.published import PublishedCheckpoint, published_checkpoints


@pytest.mark.parametrize("checkpoint", published_checkpoints(), ids=lambda checkpoint: checkpoint.name)
def test_the_sizes_give_the_published_number_of_parameters(checkpoint: PublishedCheckpoint) -> None:
    assert num_params(checkpoint.model) == checkpoint.parameters


def test_every_family_has_a_checkpoint() -> None:
    """Two families have none: no text model of Ministral's type is known, and dots.llm1's have a dense first layer."""
    assert FAMILIES.keys() - {c.family.model_type for c in published_checkpoints()} == {"ministral", "dots1"}
