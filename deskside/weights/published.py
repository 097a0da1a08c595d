"""Published checkpoints of the supported families: their sizes and numbers of parameters (facts/checkpoints.toml)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from deskside.config.model import ModelConfig
from deskside.facts.data_files import toml_file
from deskside.weights.hf_config import from_hf_config
from deskside.weights.hf_families import FAMILIES
from deskside.weights.hf_family import Family


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A checkpoint on huggingface.co. hf_config: the part of its config.json that sets sizes; model: our version."""

    name: str
    family: Family
    parameters: int
    hf_config: Mapping[str, Any]
    model: ModelConfig


@cache
def published_checkpoints() -> tuple[PublishedCheckpoint, ...]:
    """Return all checkpoints, in the order of the file."""
    checkpoints = []
    for name, entry in toml_file("checkpoints.toml").items():
        hf_config = {"model_type": entry["model_type"], **entry["config"]}
        family = FAMILIES[entry["model_type"]]
        model = from_hf_config(hf_config)
        checkpoints.append(PublishedCheckpoint(name, family, entry["parameters"], hf_config, model))
    return tuple(checkpoints)
