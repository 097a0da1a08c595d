"""JSON schemas as grammars: options of llguidance's compiler, and refusal of keywords that it does not support."""

import json
import sys
from typing import TYPE_CHECKING, Any

from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, json_value

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# White space is bounded, because some models fill an answer with it. A schema's own x-guidance cannot make the compiler
# ignore what it does not support.
OPTIONS: "JsonCompileOptions" = {"lenient": False, "whitespace_pattern": r"[ \t\n\r]{1,40}"}


def checked_schema(text: str) -> Any:
    """Return a JSON schema. Raises UsageError if it is not JSON, or has a part that would not be followed."""
    try:
        schema = json_value(text, big_integers=True)
    except Unreadable as error:
        raise UsageError(f"the JSON schema cannot be read: {error}") from None
    check_schema(schema)
    return schema


def check_schema(schema: Any) -> None:
    """Raise UsageError for bounds of a number that are no finite float64, or that llguidance 1.9.1 gets wrong.

    Between a whole number that is excluded and another bound less than 1 away, it allows the excluded number.
    """
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            _check_bounds(part)
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part


def _check_bounds(part: dict[str, Any]) -> None:
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    bounds = {name: part[name] for name in names if isinstance(part.get(name), int | float)}
    for name, bound in bounds.items():
        if not abs(bound) <= sys.float_info.max:
            raise UsageError(
                f"the JSON schema has a bound ({name}) that does not fit a float64; leave it out"
            )
    for name, bound in bounds.items():
        others = [other for other in bounds.values() if 0 < abs(other - bound) < 1]
        if name.startswith("exclusive") and bound == int(bound) and others and part.get("type") != "integer":
            raise UsageError(
                f"the JSON schema excludes the number {bound} but has the bound {others[0]}, less than 1 away, which "
                "is not supported; include the number, or move the other bound"
            )


def lark_json(schema: dict[str, Any]) -> str:
    """Return a JSON schema as a part of a Lark grammar. Raises UsageError as `check_schema` does."""
    check_schema(schema)
    return "%json " + json.dumps({**schema, "x-guidance": OPTIONS})
