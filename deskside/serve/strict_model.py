"""The base of all types of requests."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A part of a request. Unknown fields are refused, and so is a string in place of a number."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    def check(self) -> None:
        """Check the fields of a whole request that depend on each other. Raises ApiError."""
