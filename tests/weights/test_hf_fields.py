"""A config.json is read as transformers reads it."""

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.families import small_config
from deskside.config.model import ModelConfig
from deskside.utils.errors import RunError
from deskside.weights.hf_config import from_hf_config, to_hf_config
from deskside.weights.hf_families import FAMILIES

# Unlike all defaults, which fit them nevertheless: any default number of key-value heads divides that of the heads.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd"), 960),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 70),
    **dict.fromkeys(("num_attention_heads", "n_head"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 90),
    "num_key_value_heads": 2,
    "head_dim": 10,
}


def config_file(model_type: str) -> dict[str, Any]:
    """Return a config.json in which some layers have a window, if the family has windows."""
    source = to_hf_config(small_config(FAMILIES[model_type]))
    source |= {name: size for name, size in SIZES.items() if name in source}
    source |= {"sliding_window": 5, "use_sliding_window": True}
    for name in ("layer_types", "max_window_layers", "no_rope_layers"):
        source.pop(name, None)
    return to_hf_config(from_hf_config(source))


def by_transformers(source: dict[str, Any]) -> ModelConfig | None:
    """Return the configuration of a config.json that transformers has read, or None if it refuses it."""
    try:
        full = CONFIG_MAPPING[source["model_type"]].from_dict(source)
    except Exception:  # noqa: BLE001 - each configuration has its own checks
        return None
    return from_hf_config(json.loads(full.to_json_string(use_diff=False)))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_that_is_missing_or_null_has_the_default_of_transformers(model_type: str) -> None:
    whole = config_file(model_type)
    without_types = {name: value for name, value in whole.items() if name != "layer_types"}
    compared = 0
    for source in (whole, without_types):
        for name in source.keys() - {"model_type", "architectures", "use_cache"}:
            less = {other: value for other, value in source.items() if other != name}
            for given in (less, {**less, name: None}):
                try:
                    found = from_hf_config(given)
                except RunError as error:
                    # Sizes are required here.
                    assert "lacks" in str(error) or by_transformers(given) is None
                    continue
                if (expected := by_transformers(given)) is not None:
                    assert found == expected, name
                    compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    "model_type", [name for name, family in FAMILIES.items() if family.windows is not None]
)
def test_sliding_window_pattern_has_the_effect_that_it_has_in_transformers(model_type: str) -> None:
    source = {**config_file(model_type), "sliding_window_pattern": 5}
    source.pop("layer_types", None)
    assert from_hf_config(source) == by_transformers(source)
