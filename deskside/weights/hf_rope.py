"""Rotary options of a Hugging Face config.json: `rope_parameters`, or the older names beside and inside it."""

from collections.abc import Mapping
from typing import Any

from deskside.config.model import ModelConfig
from deskside.config.rope import RopeScaling
from deskside.utils.errors import UsageError
from deskside.weights.hf_family import Family


def from_hf_rope(source: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the rotary options of ModelConfig, as transformers reads them."""
    parameters = source.get("rope_parameters") or source.get("rope_scaling") or family.rope_scaling
    if family.local_rope is None:
        return _from_parameters(parameters, source, family)
    # transformers 5 has parameters for each kind of layer.
    name, default = family.local_rope
    local = parameters.get("sliding_attention") or {"rope_theta": source.get(name, default)}
    full_values = _from_parameters(parameters.get("full_attention") or parameters, source, family)
    local_values = _from_parameters({"rope_theta": default, **local}, source, family)
    if local_values == full_values:
        return full_values
    if "rope_scaling" in local_values:
        raise UsageError(
            "rope_parameters: scaling of sliding_attention other than of full_attention is not supported"
        )
    return full_values | {"rope_local_base_freq": local_values["rope_theta"]}


def _from_parameters(rope: Mapping[str, Any], source: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the options for `rope_parameters` of one kind of layer. source: config.json, for the older names."""
    written = rope.get("rope_type", rope.get("type", "default"))
    if written != "default" and written not in family.rope_types:
        raise UsageError(
            f"rope_parameters: rope_type '{written}' is not supported in {family.architecture}; only default, "
            f"{', '.join(family.rope_types)} are"
        )

    def value(name: str, default: float) -> float:
        found = rope.get(name, source.get(family.rope_names.get(name, name)))
        return default if found is None else float(found)

    share = value("partial_rotary_factor", family.partial_rotary or 1.0)
    if share != 1 and family.partial_rotary is None:
        raise UsageError(f"partial_rotary_factor: only 1 is supported in {family.architecture}")
    theta = value("rope_theta", family.rope_theta)
    values: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": share}
    if written == "default":
        return values
    kind = family.rope_types[written]
    scaling = {name: rope[name] for name in RopeScaling.model_fields if rope.get(name) is not None}
    if kind != "linear":
        longest = source["max_position_embeddings"]
        inside = rope.get("original_max_position_embeddings", longest)
        original = source.get("original_max_position_embeddings") or inside
        scaling["original_max_position_embeddings"] = original
        scaling.setdefault("factor", longest / original)
    values["rope_scaling"] = scaling | {"rope_type": kind}
    if kind == "longrope":  # the factors are chosen by this length; see RopeScaling
        values["max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return values


def to_hf_rope(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the rotary fields of config.json for a configuration."""
    scaling = config.rope_scaling
    result: dict[str, Any] = {}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if family.partial_rotary is not None:
        share_name = family.rope_names.get("partial_rotary_factor", "partial_rotary_factor")
        parameters["partial_rotary_factor"] = result[share_name] = config.partial_rotary_factor
    if scaling is not None:
        # transformers before version 5 reads rope_scaling, with the base and the share of channels next to it.
        parameters |= scaling.in_hf_form()
        result["rope_scaling"] = scaling.in_hf_form()
    if scaling is not None and scaling.rope_type == "longrope":
        original = scaling.original_max_position_embeddings
        assert original is not None
        result["original_max_position_embeddings"] = original
        if config.max_position_embeddings == original:  # `from_hf_rope` has shortened it
            result["max_position_embeddings"] = round(original * scaling.factor)
    result[family.rope_names.get("rope_theta", "rope_theta")] = config.rope_theta
    if family.local_rope is None:
        return result | {"rope_parameters": parameters}
    local = parameters
    if config.rope_local_base_freq is not None:
        local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    if (name := family.local_rope[0]) != "rope_theta":
        result[name] = local["rope_theta"]
    return result | {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
