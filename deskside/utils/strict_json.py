"""Writing of standard JSON, which has no NaN and no infinity: a number that is not finite is written as null."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON text in ASCII, which every terminal can show."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def dump_bytes(value: Any, indent: int | None = None) -> bytes:
    """Return a value as JSON text in UTF-8 with a newline, for a file.

    Python has a lone surrogate for each byte of a file name that is not UTF-8; it becomes a JSON escape.
    """
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
