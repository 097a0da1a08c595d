"""Dotted command-line options for every configuration key, by tyro.

tyro sees a tree of dataclasses made from the configuration's own fields, in which every leaf is optional text. What
comes back is a plain dict of just the keys that were given; pydantic turns text into values. So the help is generated
from the one place where a field is described, and "was it set" stays knowable.
"""

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from pydantic.fields import FieldInfo

from deskside.config.merge import LENGTH_ALIASES, keys, unknown_key
from deskside.errors import UsageError


def parse(command: type, argv: Sequence[str], prog: str, description: str) -> tuple[Any, dict[str, Any]]:
    """Parse argv for a command whose own options are the dataclass `command`, plus all configuration keys.

    Returns (an instance of `command`, the given configuration keys as a nested dict). tyro itself exits with 2 for
    options without value; an unknown option raises UsageError that names the nearest one.
    """
    options = _with_configuration(command)
    parsed: Any
    parsed, unknown = tyro.cli(
        options,
        args=list(argv),
        prog=prog,
        description=description,
        return_unknown_args=True,
        use_underscores=True,
    )
    if unknown:
        raise _unknown(unknown, options)
    own = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(command)}
    rest = [f.name for f in dataclasses.fields(options) if f.name not in own]
    return command(**own), _given({name: getattr(parsed, name) for name in rest})


def _with_configuration(command: type) -> type:
    tree: dict[str, Any] = {}
    for path, field in keys():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = field
    for alias, form in LENGTH_ALIASES.items():
        text = f"schedule.length in {alias}: the same as --schedule.length '{form.format('N')}'"
        tree["schedule"][alias] = FieldInfo(annotation=str, description=text)
    return dataclasses.make_dataclass(command.__name__, _fields(tree), bases=(command,), kw_only=True)


def _fields(tree: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    fields: list[tuple[str, Any, Any]] = []
    for name, node in tree.items():
        if isinstance(node, dict):
            group = dataclasses.make_dataclass(name, _fields(node), kw_only=True)
            group.__doc__ = f"{name} options"
            fields.append((name, group, dataclasses.field(default_factory=group)))
        else:
            argument = tyro.conf.arg(
                metavar=_metavar(node.annotation),
                help=node.description or "",
                help_behavior_hint=_default(node),
            )
            fields.append((name, Annotated[str | None, argument], dataclasses.field(default=None)))
    return fields


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    if get_origin(annotation) in (tuple, list):
        return "[...]"
    if get_origin(annotation) is dict:
        return "{...}"
    inner = [a for a in get_args(annotation) if a is not type(None)]
    if inner:
        return "|".join(dict.fromkeys(_metavar(a) for a in inner))
    return {"int": "INT", "float": "NUMBER", "str": "TEXT", "bool": "true|false"}.get(
        getattr(annotation, "__name__", ""), getattr(annotation, "__name__", "VALUE").upper()
    )


def _default(field: FieldInfo) -> str:
    return "" if field.is_required() or field.default is None else f"(default: {field.default})"


def _given(values: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            inner = _given({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
            if inner:
                result[name] = inner
        elif value is not None:
            result[name] = _value(name, value)
    return result


def _value(name: str, text: str) -> Any:
    """Lists and tables are written as in TOML; `none` unsets; everything else stays text for pydantic."""
    if text.lower() == "none":
        return None
    if text[:1] in "[{":
        try:
            return tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            raise UsageError(f"{name}: '{text}' is not a TOML list or table, such as [0.9, 0.95]") from None
    return text


def _unknown(arguments: Sequence[str], options: type) -> UsageError:
    first = arguments[0]
    if not first.startswith("-"):
        return UsageError(f"'{first}': unexpected argument; options are written --key value")
    key = re.sub(r"^-+", "", first).split("=")[0].replace("-", "_")
    return unknown_key(key)
