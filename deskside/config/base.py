"""The parent of every configuration part: frozen, and closed to keys that it does not know."""

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """An immutable piece of a configuration. An unknown key is a validation error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)
