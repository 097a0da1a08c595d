"""Base class of every configuration part: frozen, and strict about unknown keys and booleans."""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

# Kinds of prepared data. Bits per byte can be measured only for the first two, which are text.
DataKind = Literal["text", "conversations", "preference", "labelled", "questions"]
DATA_NOUNS: dict[DataKind, str] = {
    "text": "text",
    "conversations": "conversations",
    "preference": "preference pairs",
    "labelled": "labelled answers",
    "questions": "questions",
}

# A path, or a text that begins with one. Shells leave a ~ in quotes, or after an equals sign, as it is.
UserPath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]

# Types of pydantic's errors -> the message; pydantic's own speaks of parsing strings.
_WHOLE, _NUMBER, _SWITCH = "must be a whole number", "must be a number", "must be true or false"
_PLAIN = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), _WHOLE),
    **dict.fromkeys(("float_parsing", "float_type"), _NUMBER),
    **dict.fromkeys(("bool_parsing", "bool_type"), _SWITCH),
    "finite_number": "must be a finite number",
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "must be a table of keys and values"
    ),
}


class Part(BaseModel):
    """An immutable part of a configuration.

    Unknown keys, numbers that are not finite, and booleans in place of numbers are validation errors. (Pydantic alone
    would accept `true` as 1.)
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
    def _refuse_bool_as_number(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        for key, value in data.items():
            if key in cls.model_fields and _contains_bool(value):
                types = set(_types_in(cls.model_fields[key].annotation))
                if types & {int, float} and not types & {bool, Any}:
                    raise ValueError(f"{key}: must be a number, not true or false")
        return data


def first_problem(error: ValidationError) -> str:
    """Return the first validation error as one line: the key and the problem."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    problem = _PLAIN.get(first["type"]) or " ".join(first["msg"].removeprefix("Value error, ").split())
    return f"{key}: {problem}" if key else problem


def plain_message(problem: ErrorDetails) -> str:
    """Return what is wrong with a value in one line that begins with a small letter, without its key and the value."""
    message = _PLAIN.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    return " ".join(f"{message[:1].lower()}{message[1:]}".split())


def _contains_bool(value: object) -> bool:
    """Return True if a value is a bool, or a table or list that contains one."""
    if isinstance(value, Mapping):
        return any(_contains_bool(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_contains_bool(item) for item in value)
    return isinstance(value, bool)


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation consists of, such as int and None for `int | None`."""
    if arguments := get_args(annotation):
        for argument in arguments:
            yield from _types_in(argument)
    else:
        yield annotation
