"""Writing of standard JSON, which has no NaN and no infinity: a number that is not finite is written as null."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON text in ASCII, which every terminal can show."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
