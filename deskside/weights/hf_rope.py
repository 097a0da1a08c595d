"""Rotary options of a Hugging Face config.json: `rope_parameters`, or the older names beside and inside it."""

from collections.abc import Mapping
from typing import Any

from deskside.config.model import ModelConfig
from deskside.config.rope import RopeScaling
from deskside.utils.errors import UsageError
from deskside.weights.hf_family import Family


def from_hf_rope(source: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the rotary options of ModelConfig, as transformers reads them."""
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    written = rope.get("rope_type", rope.get("type", "default"))
    if written != "default" and written not in family.rope_types:
        raise UsageError(
            f"rope_parameters: rope_type '{written}' is not supported in {family.architecture}; only default, "
            f"{', '.join(family.rope_types)} are"
        )
    share = rope.get("partial_rotary_factor", source.get("partial_rotary_factor"))
    share = 1.0 if share is None else float(share)
    if share != 1 and not family.partial_rotary:
        raise UsageError(f"partial_rotary_factor: only 1 is supported in {family.architecture}")
    theta = rope.get("rope_theta", source.get("rope_theta", family.rope_theta))
    values: dict[str, Any] = {"rope_theta": float(theta), "partial_rotary_factor": share}
    if written == "default":
        return values
    kind, longest = family.rope_types[written], source["max_position_embeddings"]
    scaling = {name: rope[name] for name in RopeScaling.model_fields if rope.get(name) is not None}
    if kind != "linear":
        inside = rope.get("original_max_position_embeddings", longest)
        original = source.get("original_max_position_embeddings") or inside
        scaling["original_max_position_embeddings"] = original
        scaling.setdefault("factor", longest / original)
    values["rope_scaling"] = scaling | {"rope_type": kind}
    if kind == "longrope":  # the factors are chosen by this length; see RopeScaling
        values["max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return values


def to_hf_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary fields of config.json for a configuration."""
    scaling = config.rope_scaling
    result: dict[str, Any] = {}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1:
        parameters["partial_rotary_factor"] = config.partial_rotary_factor
        result["partial_rotary_factor"] = config.partial_rotary_factor
    if scaling is not None:
        # transformers before version 5 reads rope_scaling, with the base and the share of channels beside it.
        parameters |= scaling.in_hf_form()
        result["rope_scaling"] = scaling.in_hf_form()
    if scaling is not None and scaling.rope_type == "longrope":
        original = scaling.original_max_position_embeddings
        assert original is not None
        result["original_max_position_embeddings"] = original
        if config.max_position_embeddings == original:  # `from_hf_rope` has shortened it
            result["max_position_embeddings"] = round(original * scaling.factor)
    return {"rope_theta": config.rope_theta, **result, "rope_parameters": parameters}
