"""Base class of every configuration part: frozen, and strict about unknown keys and types."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

# What a prepared folder holds. Only the first two are text, of which bits per byte can be measured.
DataKind = Literal["text", "conversations", "preference", "questions"]
DATA_NOUNS: dict[DataKind, str] = {
    "text": "text",
    "conversations": "conversations",
    "preference": "preference pairs",
    "questions": "questions",
}


class Part(BaseModel):
    """An immutable piece of a configuration. An unknown key and a number that is not finite are validation errors.

    `true` is not a number either, although Python and pydantic accept it as 1.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, data: object) -> object:
        for key, value in data.items() if isinstance(data, Mapping) else ():
            if key in cls.model_fields and _holds_truth(value):
                kinds = set(_kinds(cls.model_fields[key].annotation))
                if kinds & {int, float} and not kinds & {bool, Any}:
                    raise ValueError(f"{key}: must be a number, not true or false")
        return data


def first_problem(error: ValidationError) -> str:
    """Return the first validation error as one line: the key and the problem."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    what = " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"{where}: {what}" if where else what


def _holds_truth(value: object) -> bool:
    inside = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return isinstance(value, bool) or any(_holds_truth(item) for item in inside)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation is made of."""
    if inner := get_args(annotation):
        for part in inner:
            yield from _kinds(part)
    else:
        yield annotation
