"""Readers of the CSV and TOML files in this folder."""

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
    """Return the rows of a CSV file as instances of the dataclass `kind`, whose fields are named like the columns.

    An empty cell becomes "" in a text field and None in an optional or boolean one. "yes" and "no" become True and
    False.

    Args:
        columns: {field: (column, factor)} for the fields whose name or unit differs from the column's.
    """
    columns = columns or {}
    parsers = []
    for field in fields(kind):  # type: ignore[arg-type]
        column, factor = columns.get(field.name, (field.name, 1.0))
        types = set(get_args(field.type)) or {field.type}  # {float, NoneType} for `float | None`
        parsers.append((field.name, column, factor, types))
    rows = []
    for cells in csv.DictReader(_text(file).splitlines()):
        values = {name: _parse_cell(cells[column], factor, types) for name, column, factor, types in parsers}
        rows.append(kind(**values))
    return tuple(rows)


@cache
def toml_file(file: str) -> dict[str, Any]:
    """Return the content of a TOML file in this folder."""
    return toml_table(_text(file))


def _text(file: str) -> str:
    return resources.files("deskside.facts").joinpath(file).read_text("utf-8")


def _parse_cell(text: str, factor: float, types: set[Any]) -> Any:
    if bool in types:
        return {"yes": True, "no": False, "": None}[text]
    if not text and type(None) in types:
        return None
    if int in types:
        return int(text)
    return float(text) * factor if float in types else text
