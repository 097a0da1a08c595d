"""Every key of the configuration as an option `--part.key`: its help, and the conversion of its text to a value."""

import argparse
import inspect
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deskside.cli.arguments import Argument, Groups, flag_of, metavar_and_help, metavar_of
from deskside.config.base import Part
from deskside.config.merge import LENGTH_ALIASES, KeyPath, config_fields, parts_of
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

GENERAL = "general"  # the help group of configuration keys outside every part, such as seed
_SET_BY_COMMAND = ("name", "data", "val")  # keys of `align` that a command sets from its own options


def config_groups(align: type[Part] | None, defaults: Mapping[str, str] = MappingProxyType({})) -> Groups:
    """Return the arguments of all configuration keys, by part.

    align: the options accepted as --align.KEY, if any; defaults: key -> text of a default that is the command's own.
    """
    # The first group of the help is `align`, because it is the subject of the command.
    groups: Groups = {} if align is None else {"align": []}
    for path, info in _keys(align):
        group = path[0] if len(path) > 1 else GENERAL
        groups.setdefault(group, []).append(_config_argument(path, info, defaults))
    return groups


def config_values(parsed: argparse.Namespace, align: type[Part] | None) -> dict[str, Any]:
    """Return the given configuration keys as a nested dict of values that are not validated yet."""
    result: dict[str, Any] = {}
    for path, info in _keys(align):
        text = getattr(parsed, ".".join(path), None)
        if text is not None:
            node = result
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = _config_value(path, info, text)
    return result


def _keys(align: type[Part] | None) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Yield all configuration keys that a command accepts, aliases included."""
    yield from config_fields()
    if align is not None:
        for path, info in config_fields(align, ("align",)):
            if path[-1] not in _SET_BY_COMMAND:
                yield path, info
    for alias, template in LENGTH_ALIASES.items():
        about = f"alias of --schedule.length '{template.format('N')}'"
        yield ("schedule", alias), FieldInfo(annotation=str, description=about)


def _config_argument(path: KeyPath, info: FieldInfo, defaults: Mapping[str, str]) -> Argument:
    """Return the argument of a configuration key. defaults: see `config_groups`."""
    key = ".".join(path)
    default = f"(default: {defaults[key]})" if key in defaults else _default_text(path, info)
    about = f"{info.description or ''} {default}".strip()
    if len(path) == 2 and path[1] == "name" and len(_alternatives(path[0])) > 1:
        metavar = "{" + ",".join(map(_tag, _alternatives(path[0]))) + "}"  # this key selects a class
    else:
        metavar = metavar_of(info.annotation)
    return (flag_of(key),), {"dest": key, **metavar_and_help(metavar, about)}


def group_description(part: str, align: type[Part] | None) -> str:
    """Return the description of a help group: how to select its class, or the first sentence of its only class."""
    if part == GENERAL:
        return "options outside every group"
    alternatives = [align] if part == "align" and align is not None else _alternatives(part)
    if len(alternatives) > 1:
        return f"--{part}.name chooses {' or '.join(map(_tag, alternatives))}"
    return inspect.cleandoc(alternatives[0].__doc__ or "").replace("\n", " ").split(". ")[0].rstrip(".")


def _default_text(path: KeyPath, info: FieldInfo) -> str:
    """Return the default for the help, such as "(default: 0.04; adamw: 0.002)", or "" if there is none.

    If --PART.name selects a class, the text also says which classes have the key and which have another default.
    """
    default = _option_text(info.default)
    if not default:
        return ""
    prefix, others = "", ""
    if len(path) == 2 and path[1] != "name":
        alternatives = _alternatives(path[0])
        having_key = [cls for cls in alternatives if path[1] in cls.model_fields]
        if having_key and len(having_key) < len(alternatives):
            prefix = f"{'/'.join(map(_tag, having_key))} only; "
        for cls in having_key:
            text = _option_text(cls.model_fields[path[1]].default) or "none"
            others += f"; {_tag(cls)}: {text}" if text != default else ""
    return f"({prefix}default: {default}{others})"


@lru_cache
def _alternatives(part: str) -> list[type[Part]]:
    """Return the classes of a configuration part, the default first. --PART.name selects one of several."""
    if part == "align":
        return []
    info = RunConfig.model_fields[part]
    return sorted(parts_of(info.annotation), key=lambda cls: not isinstance(info.default, cls))


def _tag(alternative: type[Part]) -> str:
    """Return the value of --PART.name that selects this class."""
    return str(alternative.model_fields["name"].default)


def _option_text(value: Any) -> str:
    """Return a default as it is written on the command line, or '' for None and empty values."""
    if value in (None, (), {}, PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _config_value(path: KeyPath, info: FieldInfo, text: str) -> Any:
    """Convert the text of an option to the value that pydantic validates.

    Tables are written as in TOML, lists as in TOML or separated by commas. `none` means None for a key that may be
    None, and is ordinary text for the others, such as optim.normalize. Everything else remains text.
    """
    members = _members(info)
    if text.lower() == "none" and any(
        type(None) in _members(each) for each in (info, *_in_alternatives(path))
    ):
        return None
    if text.startswith(("[", "{")):
        try:
            return toml_table(f"x = {text}")["x"]
        except Unreadable:
            raise UsageError(
                f"{'.'.join(path)}: '{text}' is not a TOML list or table, such as [0.9, 0.95]"
            ) from None
    literals = {word for member in members if get_origin(member) is Literal for word in get_args(member)}
    if takes_list(info.annotation) and text not in literals:
        return [word.strip() for word in text.split(",")]
    return text


def _members(info: FieldInfo) -> tuple[Any, ...]:
    """Return the types of which a field takes one; () if it is no union."""
    return get_args(info.annotation) if get_origin(info.annotation) in (Union, types.UnionType) else ()


def _in_alternatives(path: KeyPath) -> list[FieldInfo]:
    """Return the fields of a key in all alternatives of its part, such as optim.lr of Muon and of AdamW."""
    if len(path) != 2 or path[0] not in RunConfig.model_fields:
        return []
    classes = parts_of(RunConfig.model_fields[path[0]].annotation)
    return [cls.model_fields[path[1]] for cls in classes if path[1] in cls.model_fields]


def takes_list(annotation: Any) -> bool:
    """Return True if an annotation accepts a list of plain values, which may be separated by commas."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(map(takes_list, get_args(annotation)))
    return get_origin(annotation) in (tuple, list) and not any(map(parts_of, get_args(annotation)))
