"""Requests accept only values of the type in their schema."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import jsonschema
import pytest
from pydantic import ValidationError

from deskside.serve import app  # noqa: F401  which imports all types of requests
from deskside.serve.strict_model import OnlyFalse, StrictModel


class Switch(StrictModel):
    off: OnlyFalse | None = None


@pytest.mark.parametrize(
    "value, valid", [(False, True), (None, True), (True, False), (0, False), (0.0, False)]
)
def test_only_false_is_what_its_schema_says(value: Any, valid: bool) -> None:
    schema = jsonschema.Draft202012Validator(Switch.model_json_schema())
    assert schema.is_valid({"off": value}) == valid
    if valid:
        assert Switch.model_validate({"off": value}).off == value
    else:
        with pytest.raises(ValidationError):
            Switch.model_validate({"off": value})


def literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation):
            yield from literals(inner)


def requests(kind: type[StrictModel]) -> Iterator[type[StrictModel]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from requests(narrower)


def test_literals_are_strings() -> None:
    """A Literal of another type also accepts equal values of other types: 0.0 for False, True for 1."""
    found = {
        (kind.__name__, name): value
        for kind in requests(StrictModel)
        for name, field in kind.model_fields.items()
        for value in literals(field.annotation)
    }
    assert len(found) > 10
    assert all(isinstance(value, str) for value in found.values()), found
