"""The vocabulary of a model for prepared data."""

from collections.abc import Mapping
from typing import Any

from deskside.config import merge, presets
from deskside.config.dimensions import padded_vocabulary


def vocabulary_layer(preset: str | None, given: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Return the layer that gives a model a vocabulary of at least `tokens`; {} if it has one.

    Args:
        preset: None for a model that the planner chooses, whose vocabulary is that of the data.
        given: The user's configuration, whose vocabulary stays.
        tokens: Of the data's tokenizer.
    """
    needed = padded_vocabulary(tokens)
    if "vocab_size" in given.get("model", {}):
        return {}
    if preset is not None and merge.build(presets.layers(preset)).model.vocab_size >= needed:
        return {}
    return {"model": {"vocab_size": needed}}
