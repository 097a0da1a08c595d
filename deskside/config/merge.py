"""Layers of plain dicts -> one validated RunConfig, with one-line errors.

A configuration is built from layers: a preset, a file, the command line. They are merged before validation, and each
key remembers the layer that set it. That makes two things possible:

- An option that has no effect is an error only when the person who set it could know. `--model.position_embedding
  learned` on top of a preset that sets `rope_theta` drops the preset's key; setting both in one place is an error.
- Changing an alternative (`--optim.name adamw`) drops the lower layers' options of the other alternative.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deskside.config.base import Part
from deskside.config.duration import hours
from deskside.config.model import ModelConfig
from deskside.config.optim import MuonConfig
from deskside.config.run import RunConfig
from deskside.config.schedule import WsdConfig
from deskside.utils.errors import UsageError

Path = tuple[str, ...]

# Default alternatives; a discriminated union needs its tag.
DEFAULTS = {"optim": {"name": "muon"}, "schedule": {"name": "wsd"}}

LENGTH_ALIASES = {"steps": "{} steps", "hours": "{}h", "tokens": "{} tokens"}
ALTERNATIVES = ("optim", "schedule", "align")  # parts that are one of several, named by their `name`


@dataclass(frozen=True)
class NoEffect:
    """`key` has no effect because of `cause` when `ignored(config)` holds."""

    key: str
    cause: str
    ignored: Callable[[RunConfig], bool]
    remedy: str


def _moe(config: RunConfig) -> bool:
    return config.model.num_experts > 0


def _not_fused(config: RunConfig) -> bool:
    """Return whether compute.compile excludes the fused sublayers."""
    return config.compute.compile in ("off", "block", "model")


def _no_bf16_weight_gradient(config: RunConfig) -> bool:
    """Return whether no block, projection or step computes a weight gradient in BF16."""
    asked = config.precision
    if not asked.quantized:
        return asked.name == "fp32"
    somewhere = any(asked.recipe().kept_blocks(config.model.num_hidden_layers)) or bool(asked.keep)
    return not (somewhere or asked.warmup_steps or asked.bf16_from is not None)


# Keys of one cause, separated by spaces. The first rule that applies is reported.
_RULES: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    (
        "model.rope_theta",
        "model.position_embedding",
        lambda c: c.model.position_embedding == "learned",
        "learned positions have no frequencies: remove it, or use position_embedding rope",
    ),
    (
        "model.norm_bias",
        "model.norm",
        lambda c: c.model.norm == "rmsnorm" and c.model.norm_bias,
        "RMSNorm has no bias: remove it, or use norm layernorm",
    ),
    (
        "model.fused_gate_up",
        "model.gated_mlp",
        lambda c: not c.model.gated_mlp,
        "there is no gate to fuse: remove it, or use gated_mlp true",
    ),
    (
        "model.num_experts_per_tok model.moe_intermediate_size model.norm_topk_prob model.router_aux_loss_coef",
        "model.num_experts",
        lambda c: c.model.num_experts == 0,
        "the model is dense: set num_experts",
    ),
    ("model.intermediate_size", "model.num_experts", _moe, "experts have moe_intermediate_size"),
    ("model.mlp_bias", "model.num_experts", _moe, "experts have no bias: remove it"),
    ("model.fused_gate_up", "model.num_experts", _moe, "experts are always fused: remove it"),
    (
        "optim.weight_decay_schedule optim.cautious_weight_decay",
        "optim.weight_decay",
        lambda c: isinstance(c.optim, MuonConfig) and c.optim.weight_decay == 0,
        "weight_decay is 0: remove it, or set weight_decay",
    ),
    (
        "optim.momentum_start",
        "optim.momentum_warmup_steps",
        lambda c: isinstance(c.optim, MuonConfig) and c.optim.momentum_warmup_steps == 0,
        "the momentum does not warm up: remove it, or set momentum_warmup_steps",
    ),
    (
        "optim.normalize_beta",
        "optim.normalize",
        lambda c: isinstance(c.optim, MuonConfig) and c.optim.normalize == "none",
        "nothing is normalized: remove it, or use normalize neuron",
    ),
    (
        "schedule.decay_shape schedule.final_lr_fraction",
        "schedule.decay",
        lambda c: isinstance(c.schedule, WsdConfig) and c.schedule.decay == 0,
        "decay is 0: remove it, or set decay",
    ),
    (
        "schedule.clock",
        "schedule.length",
        lambda c: c.schedule.length is not None and c.schedule.length.unit != "seconds",
        "the length is not in time: remove it, or give --hours",
    ),
    ("data.val_fraction", "align.name", lambda c: c.align is not None, "use --align.val_fraction"),
    (  # the other objectives read in a fixed order and without prefetching
        "data.weights data.prefetch",
        "align.name",
        lambda c: c.align is not None and c.align.name != "sft",
        "only deskside train and sft have it: remove it",
    ),
    (
        "data.val_fraction",
        "data.sources",
        lambda c: not c.data.sources,
        "it belongs to data.sources; set those",
    ),
    (
        "evaluate.tokens",
        "evaluate.every",
        lambda c: c.evaluate.every is None,
        "the evaluation at the end takes the whole split: remove it, or set evaluate.every",
    ),
    (
        "precision.keep_first precision.keep_last precision.keep precision.head precision.warmup_steps "
        "precision.bf16_from precision.native precision.backend",
        "precision.name",
        lambda c: not c.precision.quantized,
        "nothing is quantized in fp32 and bf16: remove it, or use a precision.name such as fp8",
    ),
    (
        "precision.weight_cache",
        "precision.name",
        lambda c: c.precision.name == "fp32",
        "weights are used in FP32 as they are: remove it, or use another precision.name",
    ),
    (
        "precision.accumulate",
        "precision.name",
        _no_bf16_weight_gradient,
        "no weight gradient is a product of BF16 numbers: remove it, or use precision.name bf16",
    ),
    (
        "precision.accumulate",
        "compute.compile",
        lambda c: _not_fused(c) and not c.precision.keep,
        "autograd adds up the gradients: remove it, or use compute.compile fused",
    ),
    (
        "precision.weight_cache",
        "compute.compile",
        lambda c: _not_fused(c) and not c.precision.quantized,
        "weights are cast where they are used: remove it, or use compute.compile fused",
    ),
    (
        "precision.weight_cache precision.accumulate precision.native",
        "precision.backend",
        lambda c: c.precision.backend != "deskside",
        "the other libraries decide that for themselves: remove it, or use precision.backend deskside",
    ),
    (
        "precision.weight_cache precision.accumulate",
        "adapter.rank",
        lambda c: c.adapter is not None,
        "it is of the hand-written halves, which have no adapters: remove it",
    ),
    (
        "optim.scale",
        "adapter.rank",
        lambda c: c.adapter is not None,
        "the rules are for weights that are trained whole; adapters take optim.lr as it is: remove it",
    ),
)
NO_EFFECT = tuple(
    NoEffect(key, cause, ignored, remedy) for keys, cause, ignored, remedy in _RULES for key in keys.split()
)


def build(layers: Sequence[Mapping[str, Any]]) -> RunConfig:
    """Merge layers, lowest first, and validate. Raises UsageError with one line that names key and remedy."""
    values, origins = merge([DEFAULTS, *layers])
    while True:
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            raise _one_line(error) from None
        dropped = _without_effect(config, origins)
        if dropped is None:
            return config
        part = values
        for key in dropped[:-1]:
            part = part[key]
        del part[dropped[-1]]
        del origins[dropped]


def merge(layers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[Path, int]]:
    """Return the merged dict, and for every leaf key the index of the layer that set it."""
    merged: dict[str, Any] = {}
    origins: dict[Path, int] = {}
    for index, layer in enumerate(layers):
        layer = _with_aliases(layer)
        for part in ("optim", "schedule"):
            chosen = layer.get(part, {}).get("name") if isinstance(layer.get(part), Mapping) else None
            if chosen is not None and part in merged:
                _drop_other_alternative(merged[part], origins, part, chosen)
        _overlay(merged, layer, origins, index, ())
    return merged, origins


def resolved(part: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return layers of a part that was resolved before. It has every key, so keys without effect are dropped, not
    refused."""
    causes = [rule.cause.split(".")[1] for rule in NO_EFFECT if rule.cause.startswith(f"{part}.")]
    return [{part: dict(values)}, {part: {key: values[key] for key in causes if key in values}}]


def refuse_other_model(own: ModelConfig, given: Mapping[str, Any], source: str) -> None:
    """Refuse model options that contradict given weights. Raises UsageError.

    Most of them would not even fail: weights fit every rope_theta, and no longer mean what they were trained to mean.

    Args:
        own: The configuration that belongs to the weights.
        given: The configuration keys that somebody wrote, as a nested dict.
        source: Where the weights come from, for the message.
    """
    asked = given.get("model", {})
    if not isinstance(asked, Mapping) or not asked:
        return
    try:
        changed = ModelConfig.model_validate({**own.model_dump(mode="json"), **asked})
    except ValidationError:
        return  # `build` reports the error
    free = {"router_aux_loss_coef"} | (
        {"max_position_embeddings"} if own.position_embedding == "rope" else set()
    )
    for key in asked:
        if key not in free and getattr(changed, key) != getattr(own, key):
            raise UsageError(
                f"model.{key}: the weights of {source} are of a model with {_plain(getattr(own, key))}, not "
                f"{_plain(getattr(changed, key))}; leave the option out"
            )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def keys(part: type[Part] = RunConfig, prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every dotted key of a configuration, alternatives included, with its field.

    `align` is left out: which objective a run has is the command's choice, and its options are that command's.
    """
    seen: set[Path] = set()
    for name, field in part.model_fields.items():
        if part is RunConfig and name == "align":
            continue
        # The default alternative comes first: its fields are the ones that are shown.
        parts = sorted(parts_of(field.annotation), key=lambda p: not isinstance(field.default, p))
        if parts and get_origin(field.annotation) not in (tuple, list):
            for child in parts:
                for path, leaf in keys(child, (*prefix, name)):
                    if path not in seen:
                        seen.add(path)
                        yield path, leaf
        else:
            yield (*prefix, name), field


def option_keys() -> list[str]:
    """Return every dotted key that may be written, the other spellings of schedule.length included."""
    return [".".join(path) for path, _ in keys()] + [f"schedule.{alias}" for alias in LENGTH_ALIASES]


def unknown_key(key: str) -> UsageError:
    """Return the error for a key that no part has, naming the nearest one."""
    known = option_keys() + list(RunConfig.model_fields)
    leaf = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or [
        k for k in known if k.endswith(f".{leaf}")
    ]
    hint = f"; did you mean {near[0]}?" if near else "; see deskside train --help"
    return UsageError(f"{key}: there is no such option{hint}")


def _one_line(error: ValidationError) -> UsageError:
    """Return the first problem of a ValidationError as one line: key, what is wrong, what would be right."""
    first = error.errors(include_url=False)[0]
    path = [str(p) for p in first["loc"]]
    if len(path) > 1 and len(_alternatives(path[0])) > 1:
        del path[1]  # pydantic names the chosen alternative there, which is no key
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        return _misplaced(key, str(first["loc"][1])) if len(path) < len(first["loc"]) else unknown_key(key)
    key = ".".join(_without_union(path))
    message = re.sub(r"^Value error, ", "", first["msg"])
    if first["type"] == "value_error":
        # Our own validators begin with the key, given in full or relative to their part.
        named = re.match(r"^([a-z_][a-z_0-9.]*): ", message)
        if named:
            if "." not in named[1] and key:
                return UsageError(f"{key}.{message}")
            return UsageError(message)
        return UsageError(f"{key}: {message}")
    if first["type"] in ("tuple_type", "list_type"):
        return UsageError(f'{key}: is a list, written in brackets like ["a", "b"], not {first["input"]!r}')
    return UsageError(f"{key}: {message[0].lower()}{message[1:]}, not {first['input']!r}")


def _without_union(path: list[str]) -> list[str]:
    """Return the path of an error without the member of a union, which pydantic adds and which is no key."""
    for end in range(1, len(path)):
        field = dict(keys()).get(tuple(path[:end]))
        if field is not None and get_origin(field.annotation) not in (tuple, list, dict):
            return path[:end]
    return path


def _misplaced(key: str, chosen: str) -> UsageError:
    """Return the error for a key of optim or schedule that the chosen alternative does not have."""
    part, _, leaf = key.partition(".")
    for other, alternative in _alternatives(part).items():
        if leaf in alternative.model_fields:
            return UsageError(
                f"{key}: has no effect with {part}.name {chosen}: remove it, or use {part}.name {other}"
            )
    return unknown_key(key)


def _without_effect(config: RunConfig, origins: dict[Path, int]) -> Path | None:
    """Return a key to drop because a higher layer took its effect away. Raises UsageError when both come from one
    layer."""
    for rule in NO_EFFECT:
        path = tuple(rule.key.split("."))
        if path not in origins or not rule.ignored(config):
            continue
        if origins[path] >= origins.get(tuple(rule.cause.split(".")), -1):
            raise UsageError(f"{rule.key}: has no effect here: {rule.remedy}")
        return path
    return None


def _with_aliases(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """schedule.steps, .hours and .tokens are spellings of schedule.length."""
    schedule = layer.get("schedule")
    if not isinstance(schedule, Mapping):
        return layer
    given = [key for key in ("length", *LENGTH_ALIASES) if key in schedule]
    if len(given) > 1:
        names = " and ".join(f"schedule.{key}" for key in given)
        raise UsageError(f"{names}: the run can have one length only; give one of them")
    rest = {key: value for key, value in schedule.items() if key not in LENGTH_ALIASES}
    if given and given[0] != "length":
        rest["length"] = _spelled_out(given[0], schedule[given[0]])
    return {**layer, "schedule": rest}


def _spelled_out(alias: str, value: Any) -> str:
    """Return the length that an alias stands for. Hours may also be a time with units, such as 90m or 1h30m."""
    if alias == "hours" and isinstance(value, str):
        try:
            return f"{hours(value)!r}h"
        except ValueError as error:
            raise UsageError(f"schedule.hours: {error}") from None
    return LENGTH_ALIASES[alias].format(value)


def _drop_other_alternative(values: dict[str, Any], origins: dict[Path, int], part: str, chosen: str) -> None:
    alternatives = _alternatives(part)
    if chosen not in list(alternatives):
        return  # validation reports the choices
    for key in [key for key in values if key not in alternatives[chosen].model_fields]:
        del values[key]
        for path in [p for p in origins if p[:2] == (part, key)]:
            del origins[path]


def _overlay(
    target: dict[str, Any], layer: Mapping[str, Any], origins: dict[Path, int], index: int, prefix: Path
) -> None:
    for key, value in layer.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and path != ("data", "weights"):
            child = target.setdefault(key, {})
            if not isinstance(child, dict):
                raise UsageError(f"{'.'.join(path)}: is one value, not a table")
            _overlay(child, value, origins, index, path)
        else:
            target[key] = value
            origins[path] = index


def _alternatives(part: str) -> dict[str, type[Part]]:
    """Return the alternatives of `optim`, `schedule` or `align` by their `name`; nothing for other parts."""
    if part not in ALTERNATIVES:
        return {}
    return {a.model_fields["name"].default: a for a in parts_of(RunConfig.model_fields[part].annotation)}


def parts_of(annotation: Any) -> list[type[Part]]:
    """Return the Part classes inside an annotation (a union of alternatives has several)."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return [annotation]
    return [part for argument in get_args(annotation) for part in parts_of(argument)]
