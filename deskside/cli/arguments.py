"""Arguments of argparse: their groups, option names and metavars."""

import argparse
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and keyword arguments for argparse's `add_argument`
Groups = dict[str, list[Argument]]  # title of a group of the help -> its arguments
_WIDEST_METAVAR = 40  # longer choices are listed in the help text instead


def add_groups(parser: argparse.ArgumentParser, groups: Groups) -> None:
    """Add the arguments of all groups to a parser whose result has only the options that were given."""
    for title, arguments in groups.items():
        section = parser.add_argument_group(title)
        for flags, settings in arguments:
            about = settings["help"].replace("%", "%%")  # argparse formats help texts with %
            section.add_argument(*flags, **{**settings, "help": about, "default": argparse.SUPPRESS})


def flag_of(key: str) -> str:
    """Return the option of a key or field: --batch.micro-tokens of batch.micro_tokens."""
    return "--" + key.replace("_", "-")


def metavar_of(annotation: Any) -> str:
    """Return the metavar of a value of this type, such as INT or {a,b}."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return metavar_of(inner[0])
    if origin is Literal:
        return "{" + ",".join(str(choice) for choice in inner) + "}"
    if origin in (tuple, list):
        return "[...]"
    if origin is dict:
        return "{...}"
    if origin in (Union, types.UnionType):
        members = [metavar_of(member) for member in inner if member is not type(None)]
        return "|".join(dict.fromkeys(members))  # without duplicates
    name = getattr(annotation, "__name__", "value")
    return {"int": "INT", "float": "NUMBER", "str": "TEXT", "bool": "true|false"}.get(name, name.upper())


def metavar_and_help(metavar: str, about: str) -> dict[str, Any]:
    """Return the keyword arguments metavar and help. Choices that are too long for a metavar are listed in the help."""
    if len(metavar) <= _WIDEST_METAVAR:
        return {"metavar": metavar, "help": about}
    return {"metavar": "NAME", "help": f"{about}; one of {metavar.strip('{}').replace(',', ', ')}"}
