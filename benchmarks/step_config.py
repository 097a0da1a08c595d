"""Run configuration of an arm of the step benchmark. Does not import torch."""

from collections.abc import Mapping
from typing import Any

from deskside.config import merge, presets
from deskside.config.run import RunConfig


def configuration(spec: Mapping[str, Any]) -> RunConfig:
    """Return the run configuration of an arm. Raises UsageError for an impossible one.

    spec: `preset`, and optionally `tokens` per optimizer step, `micro_tokens`, `sequence_length`, `attention`,
    `compile`, `optimizer`, `device`, `precision`, and `config` with any other configuration keys, nested.
    """
    given: dict[str, dict[str, Any]] = {"batch": {}, "compute": {}}
    for key in ("sequence_length", "tokens", "micro_tokens"):
        if spec.get(key) is not None:
            given["batch"][key] = spec[key]
    for key in ("attention", "compile", "device"):
        if spec.get(key) is not None:
            given["compute"][key] = spec[key]
    given["optim"] = {"name": spec.get("optimizer", "adamw")}
    given["precision"] = {"name": spec.get("precision", "auto")}
    given["schedule"] = {"length": "1000000 steps"}
    if spec.get("sequence_length") is not None:
        layers = presets.layers(spec["preset"])
        max_length = merge.build([*layers, {"batch": {}}]).model.max_position_embeddings
        if spec["sequence_length"] > max_length:
            given["model"] = {"max_position_embeddings": spec["sequence_length"]}
    return merge.build([*presets.layers(spec["preset"]), given, spec.get("config", {})])
