"""The base of all types of requests."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema


def _must_be_false(value: bool) -> bool:
    if value:
        raise ValueError("must be false")
    return value


# Literal[False] would also accept 0 and 0.0: pydantic compares the values of a Literal, even in strict mode.
OnlyFalse = Annotated[
    bool, AfterValidator(_must_be_false), WithJsonSchema({"type": "boolean", "const": False})
]


class StrictModel(BaseModel):
    """A part of a request. Unknown fields are refused, and so is a string in place of a number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    def check(self) -> None:
        """Check the fields of a whole request that depend on each other. Raises ApiError."""
