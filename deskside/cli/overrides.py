"""Dotted command-line options for every configuration key, by tyro.

tyro sees a tree of dataclasses made from the configuration's own fields, in which every leaf is optional text. What
comes back is a plain dict of just the keys that were given; pydantic turns text into values. So the help is generated
from the one place where a field is described, and "was it set" stays knowable.
"""

import dataclasses
import inspect
import types
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tyro
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deskside.cli import parser
from deskside.config.base import Part
from deskside.config.merge import LENGTH_ALIASES, Path, keys, option_keys, parts_of
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

Options = TypeVar("Options")
SOURCES = ("name", "data", "val")  # of an objective: the command has them as options of its own


def parse(
    command: type[Options],
    argv: Sequence[str],
    prog: str,
    description: str,
    align: type[Part] | None = None,
) -> tuple[Options, dict[str, Any]]:
    """Parse argv for a command whose own options are the dataclass `command`, plus all configuration keys.

    align: the objective of this command, whose options are written --align.KEY.
    Returns (an instance of `command`, the given configuration keys as a nested dict). Raises UsageError: a missing
    value, an unknown option (it names the nearest one), a wrong value of the command's own options.
    """
    objective = _keys_of(align)
    options = _with_configuration(command, objective)
    parsed, unknown = parser.split(options, argv, prog, description)
    own = {field.name for field in dataclasses.fields(command)}  # type: ignore[arg-type]
    if unknown:
        known = parser.options(command) + [f"--{key}" for key in option_keys()]
        known += ["--" + ".".join(path) for path, _ in objective]
        raise parser.unexpected(unknown[0], known, prog)
    rest = [f.name for f in dataclasses.fields(options) if f.name not in own]
    lists = frozenset(path for path, field in [*keys(), *objective] if _takes_words(field.annotation))
    given = _given({name: getattr(parsed, name) for name in rest}, lists)
    return parser.values(command, parsed, prog), given


def _keys_of(align: type[Part] | None) -> list[tuple[Path, FieldInfo]]:
    return (
        [] if align is None else [(path, f) for path, f in keys(align, ("align",)) if path[-1] not in SOURCES]
    )


def _with_configuration(command: type, objective: Sequence[tuple[Path, FieldInfo]] = ()) -> type:
    tree: dict[str, Any] = {}
    for path, field in [*keys(), *objective]:
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = field
    for alias, form in LENGTH_ALIASES.items():
        text = f"schedule.length in {alias}: the same as --schedule.length '{form.format('N')}'"
        tree["schedule"][alias] = FieldInfo(annotation=str, description=text)
    return dataclasses.make_dataclass(
        command.__name__, _fields(tree), bases=(parser.text_options(command),), kw_only=True
    )


def _fields(tree: dict[str, Any], prefix: Path = ()) -> list[tuple[str, Any, Any]]:
    fields: list[tuple[str, Any, Any]] = []
    for name, node in tree.items():
        if isinstance(node, dict):
            group = dataclasses.make_dataclass(name, _fields(node, (*prefix, name)), kw_only=True)
            group.__doc__ = _about(name)
            fields.append((name, group, dataclasses.field(default_factory=group)))
        else:
            argument = tyro.conf.arg(
                metavar=_metavar((*prefix, name), node),
                help=node.description or "",
                help_behavior_hint=_default((*prefix, name), node),
            )
            fields.append((name, Annotated[str | None, argument], dataclasses.field(default=None)))
    return fields


def _metavar(path: Path, field: FieldInfo) -> str:
    if len(path) == 2 and path[1] == "name" and len(_alternatives(path[0])) > 1:
        return "{" + ",".join(map(_tag, _alternatives(path[0]))) + "}"
    return parser.metavar(field.annotation)


def _about(part: str) -> str:
    """What a group of options is for: the first sentence of its class, or the alternatives that it has."""
    alternatives = _alternatives(part)
    if len(alternatives) > 1:
        return f"Alternatives: {', '.join(map(_tag, alternatives))}; --{part}.name chooses."
    return inspect.cleandoc(alternatives[0].__doc__ or "").replace("\n", " ").split(". ")[0].rstrip(".") + "."


def _default(path: Path, field: FieldInfo) -> str:
    """The default for the help. Where alternatives differ it says whose, and the others' beside it."""
    first, only = _written(field.default), ""
    others = []
    if len(path) == 2 and path[1] != "name" and len(_alternatives(path[0])) > 1:
        alternatives = _alternatives(path[0])
        having = [a for a in alternatives if path[1] in a.model_fields]
        if having and len(having) < len(alternatives):
            only = f"{'/'.join(map(_tag, having))} only; "
        defaults = {_tag(a): _written(a.model_fields[path[1]].default) for a in having}
        others = [f"; {tag}: {text}" for tag, text in defaults.items() if text != first]
    return f"({only}default: {first}{''.join(others)})" if first else ""


def _alternatives(part: str) -> list[type[Part]]:
    """The classes that a part may have, the default one first."""
    field = RunConfig.model_fields[part]
    return sorted(parts_of(field.annotation), key=lambda p: not isinstance(field.default, p))


def _tag(alternative: type[Part]) -> str:
    return str(alternative.model_fields["name"].default)


def _written(value: Any) -> str:
    """A default as it would be written on the command line; nothing for one that is not there."""
    if value in (None, (), {}, PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _given(values: dict[str, Any], lists: frozenset[Path], prefix: Path = ()) -> dict[str, Any]:
    result = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            inner = _given(
                {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, lists, (*prefix, name)
            )
            if inner:
                result[name] = inner
        elif value is not None:
            result[name] = _value((*prefix, name), value, (*prefix, name) in lists)
    return result


def _takes_words(annotation: Any) -> bool:
    """Whether an annotation allows a list of plain values, which may be written with commas."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(map(_takes_words, get_args(annotation)))
    return get_origin(annotation) in (tuple, list) and not any(map(parts_of, get_args(annotation)))


def _value(path: Path, text: str, is_list: bool) -> Any:
    """Return the value that an option's text stands for.

    Tables are written as in TOML, lists as in TOML or as words with commas between them; `none` unsets what can be
    unset. The rest stays text for pydantic.
    """
    if text.lower() == "none" and path in _unsettable():
        return None
    if text.startswith(("[", "{")):
        try:
            return toml_table(f"x = {text}")["x"]
        except Unreadable:
            raise UsageError(
                f"{'.'.join(path)}: '{text}' is not a TOML list or table, such as [0.9, 0.95]"
            ) from None
    if is_list and text not in _words(path):
        return [word.strip() for word in text.split(",")]
    return text


@lru_cache
def _words(path: Path) -> frozenset[str]:
    """Return the words that a key takes in place of a list, such as `all`."""
    field = dict(keys()).get(path)
    if field is None or get_origin(field.annotation) not in (Union, types.UnionType):
        return frozenset()
    members = get_args(field.annotation)
    return frozenset(word for member in members if get_origin(member) is Literal for word in get_args(member))


@lru_cache(maxsize=1)
def _unsettable() -> frozenset[Path]:
    """The keys whose value may be None. For others, such as optim.normalize, "none" is a word like any other."""
    return frozenset(path for path, field in keys() if type(None) in get_args(field.annotation))
