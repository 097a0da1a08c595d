"""Reading a table of TOML: the value at a key in the kind that it must have, or one line that says what is wrong.

`label` begins every error: the file, and where in it.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from deskside.utils.errors import UsageError


def check_keys(table: Mapping[str, Any], keys: Collection[str], label: str) -> None:
    """Raises UsageError for a key that is not one of `keys`."""
    for key in table:
        one_of(key, keys, "key", label)


def one_of(given: str, known: Collection[str], what: str, label: str) -> str:
    """`given`, if it is one of `known`; else raises UsageError that names the nearest."""
    if given in known:
        return given
    near = difflib.get_close_matches(given, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known) or 'none'}"
    raise UsageError(f"{label}: {given}: there is no such {what}; {hint}")


def unique(given: list[str], what: str, label: str) -> None:
    """Raises UsageError for a name that is there twice."""
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{label}: {what} {twice}: is there twice; give one of them another name")


def named(entry: Mapping[str, Any], what: str, index: int, label: str) -> str:
    """How errors call an entry of a list: by its name, or by its place."""
    name = entry.get("name")
    return f"{label}: {what} {name if isinstance(name, str) and name else index + 1}"


_MISSING = object()


def text_at(table: Mapping[str, Any], key: str, label: str, default: Any = _MISSING) -> str:
    """The text at a key, `default` where there is none."""
    value = table.get(key, default)
    if value is _MISSING:
        raise UsageError(f"{label}: {key} is missing")
    if not isinstance(value, str):
        raise UsageError(f"{label}: {key}: is text in quotes, not {value!r}")
    return value


def texts_at(table: Mapping[str, Any], key: str, label: str) -> tuple[str, ...]:
    """The list of texts at a key, empty where there is none."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise UsageError(f'{label}: {key}: is a list like ["a", "b"], not {value!r}')
    return tuple(value)


def table_at(table: Mapping[str, Any], key: str, label: str) -> dict[str, Any]:
    """The table at a key, empty where there is none."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{label}: {key}: is a table, written [{key}], not {value!r}")
    return value


def tables_at(table: Mapping[str, Any], key: str, label: str) -> list[dict[str, Any]]:
    """The list of tables at a key, empty where there is none."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UsageError(f"{label}: {key}: is a list of tables, each written [[{key}]], not {value!r}")
    return value
