"""Expressions: configuration values computed from another value of the same arm, as "= model.num_attention_heads / 4".

An expression is "= KEY", "= KEY / INT" (without remainder) or "= KEY * INT". It uses the value that KEY has after all
layers are merged, which must be an integer or an expression itself. An expression that a higher layer overrides is
ignored.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deskside.config import merge
from deskside.utils.errors import UsageError

EXPRESSION = re.compile(r"=\s*([a-z_][a-z_0-9.]*)\s*(?:([*/])\s*(\d+))?\s*")
FORMS = '"= KEY", "= KEY / 4" or "= KEY * 4"'
HEAD_DIM = ("model", "head_dim")  # by default hidden_size / num_attention_heads


def is_expression(value: Any) -> bool:
    """Return True if a value of a study's file is an expression."""
    return isinstance(value, str) and value.startswith("=")


def leaf_paths(layer: Mapping[str, Any], prefix: merge.KeyPath = ()) -> list[merge.KeyPath]:
    """Return the paths of all values of a layer. The table `data.weights` counts as one value."""
    paths: list[merge.KeyPath] = []
    for key, value in layer.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and path != ("data", "weights"):
            paths += leaf_paths(value, path)
        else:
            paths.append(path)
    return paths


def resolve(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the layers with every expression replaced by its value, and without overridden expressions.

    Raises UsageError for an expression that cannot be computed.
    """
    result = [copy.deepcopy(dict(layer)) for layer in layers]
    merged, origins = merge.merge(result)  # origins: path -> index of the layer that sets it
    expressions = {path: layer for path, layer in origins.items() if is_expression(_lookup(merged, path))}
    values = {path: _value(path, merged, ()) for path in expressions}
    for index, layer in enumerate(result):
        for path in leaf_paths(layer):
            if is_expression(_lookup(layer, path)):
                *parents, key = path
                table = _lookup(layer, parents)
                if expressions.get(path) == index:
                    table[key] = values[path]
                else:
                    del table[key]
    return result


def _value(path: merge.KeyPath, merged: Mapping[str, Any], dependents: tuple[merge.KeyPath, ...]) -> int:
    """Return the integer at a path. dependents: the expressions that depend on it, to detect cycles."""
    key = ".".join(path)
    if path in dependents:
        raise UsageError(f"{key}: depends on itself; replace one of the expressions by a number")
    given = _lookup(merged, path)
    if not is_expression(given):
        return _number(path, given, merged, dependents)
    match = EXPRESSION.fullmatch(given)
    if match is None:
        raise UsageError(f"{key}: '{given}' cannot be computed; write {FORMS}")
    source, operator, number_text = match.groups()
    if tuple(source.split(".")) not in dict(merge.config_fields()):
        raise merge.unknown_key(source)
    value = _value(tuple(source.split(".")), merged, (*dependents, path))
    if operator is None:
        return value
    number = int(number_text)
    if operator == "*":
        return value * number
    if number == 0 or value % number:
        raise UsageError(
            f"{key}: {source} is {value}, which is not divisible by {number} ('{given}'); use another divisor"
        )
    return value // number


def _number(
    path: merge.KeyPath, given: Any, merged: Mapping[str, Any], dependents: tuple[merge.KeyPath, ...]
) -> int:
    """Return the integer at a path whose value `given` is not an expression; None means the default."""
    if given is None and path == HEAD_DIM:
        hidden = _value(("model", "hidden_size"), merged, dependents)
        heads = _value(("model", "num_attention_heads"), merged, dependents)
        if heads <= 0 or hidden % heads:
            raise UsageError(
                f"model.hidden_size: {hidden} is not divisible by {heads} heads; change one, or set head_dim"
            )
        return hidden // heads
    if given is None:
        given = dict(merge.config_fields())[path].default
    # Numbers from the command line are text.
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int):
        raise UsageError(f"{'.'.join(path)}: is {given!r}, but an expression uses it; set it to an integer")
    return given


def _lookup(layer: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path, or None."""
    value: Any = layer
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
