"""Merge layers of plain dicts into one validated RunConfig, with one-line errors.

A configuration is built from layers: a preset, a file, the command line. They are merged before validation, and it is
recorded which layer set each key (its origin):

- An option without effect is an error, unless a higher layer took its effect away: `--model.position_embedding learned`
  on top of a preset that sets `rope_theta` drops the preset's key, but setting both in one layer is an error.
- A layer that selects another alternative (`--optim.name adamw`) drops the options of lower layers that this
  alternative does not have.
- `data.sources` are those of the `data.path` in the same layer: a layer that names another path drops them. Otherwise a
  misspelt path would be filled with the preset's text, and a model trained on it.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deskside.config.base import Part, plain_message
from deskside.config.duration import parse_hours
from deskside.config.model import ModelConfig
from deskside.config.no_effect import NO_EFFECT
from deskside.config.rope import RopeScaling
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError

KeyPath = tuple[str, ...]  # ("optim", "lr") for the key optim.lr

# The default alternatives: pydantic needs the tag of a discriminated union.
DEFAULTS = {"optim": {"name": "muon"}, "schedule": {"name": "wsd"}}

LENGTH_ALIASES = {"steps": "{} steps", "hours": "{}h", "tokens": "{} tokens"}
ALTERNATIVES = ("optim", "schedule", "align")  # parts with several alternative classes, selected by `name`


def build(layers: Sequence[Mapping[str, Any]]) -> RunConfig:
    """Return the validated configuration of the layers, lowest first. Raises UsageError with key and problem."""
    return build_and_dropped(layers)[0]


def build_and_dropped(layers: Sequence[Mapping[str, Any]]) -> tuple[RunConfig, list[KeyPath]]:
    """Return `build(layers)`, and the given keys that it dropped, because a higher layer took their effect away."""
    values, origins = merge([DEFAULTS, *layers])
    dropped: list[KeyPath] = []
    while True:
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            raise _usage_error(error) from None
        path = _key_without_effect(config, origins)
        if path is None:
            return config, dropped
        delete(values, path)
        del origins[path]
        dropped.append(path)


def delete(values: dict[str, Any], path: KeyPath) -> None:
    """Delete a key of a nested dict, if it is there."""
    for key in path[:-1]:
        values = values.get(key, {})
    values.pop(path[-1], None)


def merge(layers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the merged dict, and for every leaf key the index of the layer that set it."""
    merged: dict[str, Any] = {}
    origins: dict[KeyPath, int] = {}
    for index, layer in enumerate(layers):
        layer = _replace_length_alias(layer)
        for part in ("optim", "schedule"):
            alternative = layer.get(part, {}).get("name") if isinstance(layer.get(part), Mapping) else None
            if alternative is not None and isinstance(merged.get(part), dict):
                _drop_other_alternative(merged[part], origins, part, alternative)
        _drop_sources_of_other_path(merged, origins, layer, index)
        _overlay(merged, layer, origins, index, ())
    return merged, origins


def _drop_sources_of_other_path(
    merged: dict[str, Any], origins: dict[KeyPath, int], layer: Mapping[str, Any], index: int
) -> None:
    """Empty the lower layers' data.sources if the layer sets another data.path, but not what it is made from."""
    data, lower = layer.get("data"), merged.get("data")
    if not isinstance(data, Mapping) or not isinstance(lower, dict) or not lower.get("sources"):
        return
    if "sources" not in data and "path" in data and data["path"] != lower.get("path"):
        lower["sources"] = []
        origins["data", "sources"] = index


def resolved_layers(part: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return layers for a part of a validated configuration, which has every key, with or without effect.

    The second layer repeats the causes of `NO_EFFECT`, so that keys without effect are dropped instead of refused.
    """
    causes = [rule.cause.split(".")[1] for rule in NO_EFFECT if rule.cause.startswith(f"{part}.")]
    return [{part: dict(values)}, {part: {key: values[key] for key in causes if key in values}}]


def refuse_other_model(
    trained: ModelConfig, overrides: Mapping[str, Any], source: str, remedies: Mapping[str, str] | None = None
) -> None:
    """Raise UsageError for model options that contradict given weights.

    Many of them would cause no other error: the weights load with any rope_theta, but were trained with only one.
    rope_scaling may be added, because it is made for weights that were trained without it. model_type only names the
    architecture of exports.

    Args:
        trained: The configuration that the weights were trained with.
        overrides: The configuration keys that the user gave, as a nested dict.
        source: Where the weights come from, for the message.
        remedies: What else the command offers than to leave an option out, by key.
    """
    options = overrides.get("model", {})
    if not isinstance(options, Mapping) or not options:
        return
    try:
        own = trained.model_dump(mode="json")
        given = dict(options)
        scaling = given.pop("rope_scaling", None)
        if trained.rope_scaling is not None and isinstance(scaling, Mapping):
            given["rope_scaling"] = {**own["rope_scaling"], **scaling}
        changed = ModelConfig.model_validate({**own, **given})
    except ValidationError:
        return  # `build` reports the error
    changeable = {"router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate", "model_type"}
    if trained.position_embedding == "rope":
        changeable |= {"max_position_embeddings"} | (
            {"rope_scaling"} if trained.rope_scaling is None else set()
        )
    for key in options:
        if key not in changeable and getattr(changed, key) != getattr(trained, key):
            raise UsageError(
                f"model.{key}: the weights of {source} are of a model with {_option_text(getattr(trained, key))}, not "
                f"{_option_text(getattr(changed, key))}; "
                f"{(remedies or {}).get(key, 'leave the option out')}"
            )


def _option_text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, RopeScaling):
        fields = value.in_hf_form().items()
        return ", ".join(f"{name} {field}" for name, field in fields if not isinstance(field, list))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def config_fields(part: type[Part] = RunConfig, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yield the path and the field of every key of a configuration, including those of all alternatives.

    `align` is left out: each fine-tuning command has its own objective, and adds the options of this objective itself.
    """
    seen: set[KeyPath] = set()
    for name, field in part.model_fields.items():
        if part is RunConfig and name == "align":
            continue
        # The default alternative comes first: of a key that several alternatives have, its field is the one yielded.
        parts = sorted(parts_of(field.annotation), key=lambda p: not isinstance(field.default, p))
        if parts and get_origin(field.annotation) not in (tuple, list):
            for child in parts:
                for path, child_field in config_fields(child, (*prefix, name)):
                    if path not in seen:
                        seen.add(path)
                        yield path, child_field
        else:
            yield (*prefix, name), field


def option_keys() -> list[str]:
    """Return the keys of `config_fields` as dotted text, and the aliases of schedule.length."""
    return [".".join(path) for path, _ in config_fields()] + [f"schedule.{alias}" for alias in LENGTH_ALIASES]


def check_keys(values: Mapping[str, Any], file: str) -> None:
    """Raise UsageError, which names the file, for a key of a user's file that does not exist."""
    known = [*(path for path, _ in config_fields()), *(("schedule", alias) for alias in LENGTH_ALIASES)]
    known.append(("align",))  # its keys depend on the command
    beginnings = {path[:length] for path in known for length in range(1, len(path))}

    def check(table: Mapping[str, Any], prefix: KeyPath) -> None:
        for key, value in table.items():
            path = (*prefix, key)
            if path in beginnings and isinstance(value, Mapping):
                check(value, path)
            elif path not in beginnings and path not in known:
                raise UsageError(f"{file}: {unknown_key('.'.join(path))}")

    check(values, ())


def unknown_key(key: str) -> UsageError:
    """Return the error for a key that does not exist, with the most similar key as a suggestion."""
    known = option_keys() + list(RunConfig.model_fields)
    leaf = key.rsplit(".", 1)[-1]
    similar = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    similar = similar or [other for other in known if other.endswith(f".{leaf}")]
    hint = f"; did you mean {similar[0]}?" if similar else "; see deskside train --help"
    return UsageError(f"{key}: there is no such option{hint}")


def _usage_error(error: ValidationError) -> UsageError:
    """Return the first problem of a ValidationError as a one-line error with the key and the problem."""
    first, *others = error.errors(include_url=False)
    in_list = any(isinstance(part, int) for part in first["loc"])
    if first["type"] == "missing" and not in_list:
        # If a key is misspelt, report it and not the key that is missing because of it. In a table of a list, no
        # suggestion could be made for a misspelt key.
        first = next((other for other in others if other["type"] == "extra_forbidden"), first)
    path = [str(p) for p in first["loc"]]
    if len(path) > 1 and len(_alternatives(path[0])) > 1:
        del path[1]  # pydantic inserts the name of the alternative, which is not a key
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        if len(path) < len(first["loc"]):
            return _wrong_alternative(key, str(first["loc"][1]))
        return unknown_key(key)
    key = ".".join(_without_union_member(path))
    message = re.sub(r"^Value error, ", "", first["msg"])
    if first["type"] == "value_error":
        # Messages of our own model validators start with the key, in full or relative to their part.
        named = re.match(r"^([a-z_][a-z_0-9.]*): ", message)
        if named:
            if "." not in named[1] and key:
                return UsageError(f"{key}.{message}")
            return UsageError(message)
        return UsageError(f"{key}: {message}")
    if first["type"] == "missing":
        return UsageError(
            f"{key}: is missing; {'add it to the table' if in_list else f'set it with --{key}'}"
        )
    if first["type"] == "union_tag_invalid":
        *most, last = sorted(_alternatives(path[0]))
        return UsageError(
            f"{key}.name: input should be {', '.join(most)} or {last}, not {first['ctx']['tag']!r}"
        )
    if first["type"] in ("tuple_type", "list_type"):
        return UsageError(f'{key}: is a list, written in brackets like ["a", "b"], not {first["input"]!r}')
    return UsageError(f"{key}: {plain_message(first)}, not {first['input']!r}")


def _without_union_member(path: list[str]) -> list[str]:
    """Return the path of an error without the union member that pydantic appends, which is not a key."""
    fields = dict(config_fields())
    for end in range(1, len(path)):
        field = fields.get(tuple(path[:end]))
        if field is not None and get_origin(field.annotation) not in (tuple, list, dict):
            return path[:end]
    return path


def _wrong_alternative(key: str, chosen: str) -> UsageError:
    """Return the error for a key that the chosen alternative of its part does not have."""
    part, _, leaf = key.partition(".")
    for other, alternative in _alternatives(part).items():
        if leaf in alternative.model_fields:
            return UsageError(
                f"{key}: has no effect with {part}.name {chosen}: remove it, or use {part}.name {other}"
            )
    return unknown_key(key)


def _key_without_effect(config: RunConfig, origins: dict[KeyPath, int]) -> KeyPath | None:
    """Return a key that a higher layer made ineffective, or None. Raises UsageError for other keys without effect."""
    for rule in NO_EFFECT:
        path = tuple(rule.key.split("."))
        if path not in origins or not rule.ignored(config):
            continue
        if origins[path] >= origins.get(tuple(rule.cause.split(".")), -1):
            raise UsageError(f"{rule.key}: has no effect here: {rule.remedy}")
        return path
    return None


def _replace_length_alias(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the layer with schedule.length in place of its alias schedule.steps, .hours or .tokens."""
    schedule = layer.get("schedule")
    if not isinstance(schedule, Mapping):
        return layer
    given = [key for key in ("length", *LENGTH_ALIASES) if key in schedule]
    if len(given) > 1:
        names = " and ".join(f"schedule.{key}" for key in given)
        raise UsageError(f"{names}: the run can have one length only; give one of them")
    replaced = {key: value for key, value in schedule.items() if key not in LENGTH_ALIASES}
    if given and given[0] != "length":
        replaced["length"] = length_of_alias(given[0], schedule[given[0]])
    return {**layer, "schedule": replaced}


def length_of_alias(alias: str, value: Any) -> str:
    """Return the length that an alias stands for. Hours may also be a time with units, such as 90m or 1h30m."""
    if alias == "hours" and isinstance(value, str):
        try:
            return f"{parse_hours(value)!r}h"
        except ValueError as error:
            raise UsageError(f"schedule.hours: {error}") from None
    return LENGTH_ALIASES[alias].format(value)


def _drop_other_alternative(
    values: dict[str, Any], origins: dict[KeyPath, int], part: str, chosen: str
) -> None:
    """Delete the keys of a part that the chosen alternative does not have."""
    alternatives = _alternatives(part)
    if chosen not in list(alternatives):
        return  # validation reports the choices
    for key in [key for key in values if key not in alternatives[chosen].model_fields]:
        del values[key]
        for path in [p for p in origins if p[:2] == (part, key)]:
            del origins[path]


def _overlay(
    target: dict[str, Any], layer: Mapping[str, Any], origins: dict[KeyPath, int], index: int, prefix: KeyPath
) -> None:
    """Copy the values of a layer to `target`, and record its index as their origin."""
    for key, value in layer.items():
        path = (*prefix, key)
        # Mixture weights are replaced as a whole, like a single value.
        if isinstance(value, Mapping) and path != ("data", "weights"):
            if target.get(key) is None:  # an optional part that a lower layer does not have
                target[key] = {}
            child = target[key]
            if not isinstance(child, dict):
                raise UsageError(
                    f"{'.'.join(path)}: is given both as one value and as a table; remove one of them"
                )
            _overlay(child, value, origins, index, path)
        else:
            target[key] = value
            origins[path] = index


def _alternatives(part: str) -> dict[str, type[Part]]:
    """Return the classes of `optim`, `schedule` or `align` by their `name`; an empty dict for other parts."""
    if part not in ALTERNATIVES:
        return {}
    classes = parts_of(RunConfig.model_fields[part].annotation)
    return {cls.model_fields["name"].default: cls for cls in classes}


def parts_of(annotation: Any) -> list[type[Part]]:
    """Return the Part classes inside an annotation (a union of alternatives has several)."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return [annotation]
    return [part for argument in get_args(annotation) for part in parts_of(argument)]
