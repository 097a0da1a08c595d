"""Conversion between a Hugging Face config.json and ModelConfig, by the table of families (hf_families.py).

Fields that a family does not support are refused by name.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from deskside.config.base import first_problem
from deskside.config.model import ModelConfig
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf_families import FAMILIES, family_of
from deskside.weights.hf_family import Family, shortest_pattern
from deskside.weights.hf_rope import from_hf_rope, to_hf_rope


def from_hf_config(source: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig for the content of a published config.json.

    Raises UsageError for an unsupported architecture or option, and RunError for missing or invalid values.
    """
    family, text_source = text_part(source)
    model_type = family.model_type
    for part in (source, text_source):
        _check_quantization(part, family)
    try:
        config = ModelConfig(**_options(text_source, family))
    except KeyError as error:
        raise RunError(f"config.json of a {model_type} model lacks {error}; is it complete?") from error
    except ValidationError as error:
        raise RunError(f"config.json describes an impossible model: {first_problem(error)}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(f"config.json has an invalid value ({error}); is it damaged?") from error
    typed = config.model_copy(update={"model_type": model_type})
    family_of(typed)  # raises UsageError if the values fit only another family
    # Without model_type, an export has the first family of the table that fits.
    return config if family_of(config) is family else typed


def text_part(source: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """Return the family of a config.json, and the part of it about the text model: all, if there is nothing else.

    Raises UsageError for an unsupported architecture.
    """
    model_type, text_source = source.get("model_type"), source.get("text_config")
    if model_type == "mistral" and "layer_types" in source:  # as in transformers' AutoConfig
        model_type = "ministral"
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family, source
        if family.multimodal == model_type and isinstance(text_source, Mapping):
            return family, text_source
    raise UsageError(
        f"model_type '{model_type}' is not supported; the nearest that is: {nearest_family(source)} (of "
        f"{', '.join(FAMILIES)})"
    )


def nearest_family(source: Mapping[str, Any]) -> str:
    """Return the model_type of the family most like that of an unsupported config.json.

    It is the one whose name begins most alike, with experts if the model has some; for an unlike name, Llama's or
    Qwen3-MoE's.
    """
    experts = any("experts" in name and value for name, value in source.items())

    def likeness(family: Family) -> tuple[int, bool]:
        letters = zip(str(source.get("model_type")), family.model_type, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], letters))
        return common if common >= 3 else 0, ("num_experts" in family.fields) == experts

    nearest = max(FAMILIES.values(), key=likeness)
    if likeness(nearest)[0]:
        return nearest.model_type
    return "qwen3_moe" if experts else "llama"


def _check_quantization(source: Mapping[str, Any], family: Family) -> None:
    """Raise UsageError if the weights are quantized in a format that is not converted."""
    quantization = source.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if quantization and method != family.quantization:
        raise UsageError(
            f"quantization_config: weights of {method} are not supported in {family.architecture}; use the checkpoint "
            "that they were made from (--adapter.base nf4 quantizes it while it is loaded)"
        )


def _options(source: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the options of ModelConfig for a config.json."""
    for name, constant in family.constants.items():
        value = source.get(name)
        if (constant.missing if value is None else value) != constant.value:
            raise UsageError(f"{name}: only {constant.value} is supported in {family.architecture}")
    values = {
        **family.options,
        **{option: hf_field.value(source) for option, hf_field in family.fields.items()},
    }
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if values.get("attention_multiplier") == head_dim**-0.5:
        values["attention_multiplier"] = None  # the default
    layers = values["num_hidden_layers"]
    # A damaged file must not allocate a list of any length.
    if not isinstance(layers, int) or layers > 10_000:
        raise ValueError(f"num_hidden_layers: {layers!r}")
    if values.get("position_embedding") != "learned":
        values |= from_hf_rope(source, family)
    windows = _windows(source, family, layers)
    if any(windows):
        assert family.windows is not None
        values["sliding_window"] = source.get("sliding_window", family.windows.size)
        values["window_pattern"] = shortest_pattern("".join("S" if window else "L" for window in windows))
    else:
        values.pop("rope_local_base_freq", None)
    return values


def _windows(source: Mapping[str, Any], family: Family, layers: int) -> list[bool]:
    """Return for each layer whether it uses a sliding window."""
    windows = family.windows
    if windows is None or not source.get("sliding_window", windows.size):
        return [False] * layers
    if windows.switch is not None and not source.get(windows.switch):
        return [False] * layers
    types = source.get("layer_types") if windows.by_layer else None
    if types is None:
        return windows.default(source, layers)
    if len(types) != layers:
        raise ValueError(f"layer_types: {len(types)} layers of {layers}")
    if others := set(types) - {"sliding_attention", "full_attention"}:
        raise UsageError(f"layer_types: {min(others)} is not supported in {family.architecture}")
    return [kind == "sliding_attention" for kind in types]


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json for a configuration, without the fields of tokenizer and dtype."""
    family = family_of(config)
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "use_cache": True,
        **{name: constant.value for name, constant in family.constants.items()},
        **family.written,
    }
    for option, hf_field in family.fields.items():
        for name in filter(None, (hf_field.name, hf_field.copy)):
            result[name] = hf_field.write(getattr(config, option), config)
    if config.position_embedding == "rope":
        result |= to_hf_rope(config, family)
    if family.windows is not None:
        result |= _hf_windows(config, family)
    return result


def _hf_windows(config: ModelConfig, family: Family) -> dict[str, Any]:
    assert family.windows is not None
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    result: dict[str, Any] = {"sliding_window": config.sliding_window if any(windows) else None}
    if family.windows.by_layer and family.windows.switch is None and not any(windows):
        # transformers prepares a window even if no layer has one, so it must have a size.
        result["sliding_window"] = config.max_position_embeddings
    if family.windows.switch is not None:
        result[family.windows.switch] = any(windows)
    if family.windows.by_layer:
        result["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if family.windows.first_layer:
        result["max_window_layers"] = windows.index(config.sliding_window) if any(windows) else len(windows)
    return result
