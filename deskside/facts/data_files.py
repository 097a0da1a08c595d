"""Reading of the CSV and TOML files beside this module."""

import csv
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from typing import Any, TypeVar, get_args

from deskside.utils.parsing import toml_table

Row = TypeVar("Row")


def csv_rows(
    file: str, kind: type[Row], columns: Mapping[str, tuple[str, float]] | None = None
) -> tuple[Row, ...]:
    """Return the rows of a CSV file as dataclasses whose fields are named like the columns.

    An empty cell is "" where text is expected, else None. "yes" is True.

    Args:
        columns: (column, factor) of each field that has another name or unit than its column.
    """
    columns = columns or {}
    parsers = []
    for field in fields(kind):  # type: ignore[arg-type]
        column, factor = columns.get(field.name, (field.name, 1.0))
        parsers.append((field.name, column, factor, set(get_args(field.type)) or {field.type}))
    found = []
    for row in csv.DictReader(_text(file).splitlines()):
        found.append(kind(**{name: _cell(row[column], by, kinds) for name, column, by, kinds in parsers}))
    return tuple(found)


@cache
def toml_file(file: str) -> dict[str, Any]:
    return toml_table(_text(file))


def _text(file: str) -> str:
    return resources.files("deskside.facts").joinpath(file).read_text("utf-8")


def _cell(text: str, factor: float, kinds: set[Any]) -> Any:
    if bool in kinds:
        return {"yes": True, "no": False, "": None}[text]
    if not text and type(None) in kinds:
        return None
    if int in kinds:
        return int(text)
    return float(text) * factor if float in kinds else text
