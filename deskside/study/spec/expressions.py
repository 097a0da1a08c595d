"""Values computed from other values of the same arm: "= model.num_attention_heads / 4".

An expression is KEY, KEY / INT (which must divide) or KEY * INT. KEY is an integer key of the configuration, by its
value after all layers are merged; it may itself be an expression. An expression that a higher layer overrides is
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
HEAD_DIM = ("model", "head_dim")  # derived from the width and the heads by default


def is_expression(value: Any) -> bool:
    """Return whether a value of a study's file is an expression."""
    return isinstance(value, str) and value.startswith("=")


def leaves(layer: Mapping[str, Any], prefix: merge.KeyPath = ()) -> list[merge.KeyPath]:
    """Return the paths of all values of a layer. `data.weights` is a table, but one value."""
    found: list[merge.KeyPath] = []
    for key, value in layer.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and path != ("data", "weights"):
            found += leaves(value, path)
        else:
            found.append(path)
    return found


def resolve(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace every expression by its value. Raises UsageError for one that cannot be computed."""
    result = [copy.deepcopy(dict(layer)) for layer in layers]
    merged, origins = merge.merge(result)
    asked = {path: origin for path, origin in origins.items() if is_expression(_at(merged, path))}
    values = {path: _value(path, merged, ()) for path in asked}
    for index, layer in enumerate(result):
        for path in [path for path in leaves(layer) if is_expression(_at(layer, path))]:
            *parents, last = path
            table = _at(layer, parents)
            if asked.get(path) == index:
                table[last] = values[path]
            else:
                del table[last]
    return result


def _value(path: merge.KeyPath, merged: Mapping[str, Any], above: tuple[merge.KeyPath, ...]) -> int:
    """Return the integer at a key. above: the expressions that depend on it, to detect cycles."""
    key = ".".join(path)
    if path in above:
        raise UsageError(f"{key}: depends on itself; give one of the values as a number")
    given = _at(merged, path)
    if not is_expression(given):
        return _number(path, given, merged, above)
    match = EXPRESSION.fullmatch(given)
    if match is None:
        raise UsageError(f"{key}: '{given}' cannot be computed; write {FORMS}")
    source, operator, text = match.groups()
    if tuple(source.split(".")) not in dict(merge.config_fields()):
        raise merge.unknown_key(source)
    value = _value(tuple(source.split(".")), merged, (*above, path))
    if operator is None:
        return value
    number = int(text)
    if operator == "*":
        return value * number
    if number == 0 or value % number:
        raise UsageError(
            f"{key}: {source} is {value}, which {number} does not divide ('{given}'); use another divisor"
        )
    return value // number


def _number(
    path: merge.KeyPath, given: Any, merged: Mapping[str, Any], above: tuple[merge.KeyPath, ...]
) -> int:
    if given is None and path == HEAD_DIM:
        hidden = _value(("model", "hidden_size"), merged, above)
        heads = _value(("model", "num_attention_heads"), merged, above)
        if heads <= 0 or hidden % heads:
            raise UsageError(
                f"model.hidden_size: {hidden} is not divisible by {heads} heads; change one, or set head_dim"
            )
        return hidden // heads
    if given is None:
        given = dict(merge.config_fields())[path].default
    # Numbers of the command line are text.
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int):
        raise UsageError(
            f"{'.'.join(path)}: is {given!r}, not an integer, so no value can be computed from it"
        )
    return given


def _at(layer: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the value at a path, or None."""
    found: Any = layer
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
