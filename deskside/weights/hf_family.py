"""The description of a Hugging Face architecture (`Family`), and the options of a ModelConfig that one lacks.

Every option of ModelConfig that a Family does not mention must have its default value. An export with another value is
refused, because it would load but compute something else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deskside.config.model import ModelConfig

REQUIRED = object()  # default of a field that config.json must have


@dataclass(frozen=True)
class Field:
    """A field of config.json that one option of ModelConfig is read from and written to.

    default: the value if the field is missing or null; a function of config.json; or REQUIRED. older: another name
    that some files have. copy: another name that is written too. read: (value, config.json) -> our value.
    write: (our value, ModelConfig) -> value.
    """

    name: str
    default: Any = REQUIRED
    older: str | None = None
    copy: str | None = None
    read: Callable[[Any, Mapping[str, Any]], Any] = lambda value, source: value
    write: Callable[[Any, ModelConfig], Any] = lambda value, config: value

    def value(self, source: Mapping[str, Any]) -> Any:
        """Return our value for the content of a config.json. Raises KeyError if a required field is missing."""
        value = source.get(self.name)
        if value is None and self.older is not None:
            value = source.get(self.older)
        if value is None and self.default is REQUIRED:
            raise KeyError(self.name)
        if value is None:
            return self.default(source) if callable(self.default) else self.default
        return self.read(value, source)


@dataclass(frozen=True)
class Constant:
    """A field of config.json of which only one value is supported. missing: the value of a file without the field."""

    value: Any
    missing: Any


@dataclass(frozen=True)
class Windows:
    """The fields of config.json that say which layers have a sliding window.

    default: (config.json, layers) -> one truth value per layer, for a file without `layer_types`. size: tokens of the
    window for a file without `sliding_window`. switch: field that must be true for any window. by_layer: `layer_types`
    may name the layers; otherwise all layers have the window. first_layer: whether `max_window_layers`, the first layer
    with a window, is written.
    """

    default: Callable[[Mapping[str, Any], int], list[bool]]
    size: int | None = None
    switch: str | None = None
    by_layer: bool = True
    first_layer: bool = False


# The kinds that transformers has for every architecture. Its "dynamic" is left out, because it changes the frequencies
# of keys that are in the cache already.
_ROPE_TYPES = {name: name for name in ("linear", "llama3", "yarn", "longrope")}


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    Args:
        names: Logical module name -> Hugging Face module name.
        fields: Option of ModelConfig -> field of config.json.
        options: Options of ModelConfig for which the architecture has only one value.
        constants: Fields of config.json for which only one value is supported.
        written: Fields that are written and never read.
        conditions: (text, holds): further requirements of an export on a ModelConfig.
        windows: None if it has no sliding windows.
        rope_theta: The base if config.json has none.
        rope_scaling: The other `rope_parameters` if config.json has none.
        rope_names: Its names of rope_theta and partial_rotary_factor before transformers 5.
        local_rope: Window layers have their own base: the field with it before transformers 5, and its default.
        partial_rotary: The share of rotated channels if config.json has none; None if all are always rotated.
        rope_types: Name in config.json -> ours (RopeScaling).
        transposed: The matrices of the blocks are (in, out), as in GPT-2's Conv1D.
        prefix: Prefix of tensor names that some checkpoints omit.
        buffers: Suffixes of stored tensors that are not weights.
        norm_offset: Added to the stored weight of a norm to get ours: 1 in Gemma.
        stacked_by_head: A tensor of q, k and v is grouped by head (q0 k0 v0 q1 ...).
        quantization: quant_method of checkpoints whose weights are converted as they are loaded; others are refused.
        stacked_experts: One tensor has a projection of all experts, (E, in, out), in which gate and up alternate.
        multimodal: model_type of models with images whose text part, under text_config, has this architecture.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    fields: Mapping[str, Field]
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Constant] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    conditions: tuple[tuple[str, Callable[[ModelConfig], bool]], ...] = ()
    windows: Windows | None = None
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    rope_names: Mapping[str, str] = field(default_factory=dict)
    local_rope: tuple[str, float] | None = None
    partial_rotary: float | None = None
    rope_types: Mapping[str, str] = field(default_factory=lambda: _ROPE_TYPES)
    transposed: bool = False
    prefix: str = ""
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    norm_offset: float = 0.0
    stacked_by_head: bool = False
    quantization: str | None = None
    stacked_experts: bool = False
    multimodal: str | None = None


# Options of ModelConfig that any family can have: they do not change what a model computes.
_FREE_OPTIONS = {
    "model_type",
    "fused_qkv",
    "fused_gate_up",
    "initializer_range",
    "q_norm_init",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_bias_update_rate",
}
# Options without effect in a model without or with experts, and with learned positions.
_DENSE_OPTIONS = {"intermediate_size"}
_EXPERT_OPTIONS = {
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "scoring_func",
}
_ROPE_OPTIONS = {"rope_theta", "rope_scaling"}
_WINDOW_OPTIONS = {"sliding_window", "window_pattern"}


def unsupported_options(config: ModelConfig, family: Family) -> list[str]:
    """Return a text for each option of a configuration that a family lacks."""
    without_effect = _EXPERT_OPTIONS if config.num_experts == 0 else _DENSE_OPTIONS
    free = _FREE_OPTIONS | without_effect | family.fields.keys() | _ROPE_OPTIONS | {"head_dim"}
    if family.windows is not None:
        free |= _WINDOW_OPTIONS
    if family.partial_rotary is not None:
        free |= {"partial_rotary_factor"}
    if family.local_rope is not None:
        free |= {"rope_local_base_freq"}
    lacking = []
    for name, option in ModelConfig.model_fields.items():
        value, only = getattr(config, name), family.options.get(name, option.default)
        if name not in free and value != only:
            lacking.append(f"{name} = {_as_written(value)} (only {_as_written(only)})")
    if config.rope_scaling is not None and config.rope_scaling.rope_type not in family.rope_types.values():
        kinds = ", ".join(sorted(set(family.rope_types.values())))
        lacking.append(f"rope_type = {config.rope_scaling.rope_type} (only {kinds})")
    lacking += _contradictions(config, family)
    if "num_experts" in family.fields and config.num_experts == 0:
        lacking.append("num_experts = 0")
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    if family.windows is not None and not family.windows.by_layer and len(set(windows)) > 1:
        lacking.append("window_pattern with S and L (all layers have a window, or none)")
    if "head_dim" not in family.fields and config.num_attention_heads * config.head_dim != config.hidden_size:
        lacking.append("num_attention_heads * head_dim other than hidden_size")
    return lacking + [text for text, holds in family.conditions if not holds(config)]


def _contradictions(config: ModelConfig, family: Family) -> list[str]:
    """Return a text for each pair of options with different values that the family reads from the same field."""
    written: dict[str, tuple[str, Any]] = {}
    texts = []
    for option, hf_field in family.fields.items():
        value = hf_field.write(getattr(config, option), config)
        first, first_value = written.setdefault(hf_field.name, (option, value))
        if value != first_value:
            texts.append(f"{option} other than {first}")
    return texts


def _as_written(value: object) -> str:
    """Return a value as it is written in a configuration file."""
    return "none" if value is None else str(value).lower()


def shortest_pattern(pattern: str) -> str:
    """Return the shortest string that gives the pattern when repeated and cut to its length: SLSLS -> SL."""
    for length in range(1, len(pattern)):
        unit = pattern[:length]
        if (unit * len(pattern))[: len(pattern)] == pattern:
            return unit
    return pattern
