"""Parsing of JSON and TOML from untrusted or damaged files.

Python's parsers raise more than their own error: RecursionError for deep nesting, another ValueError for long integers,
UnicodeDecodeError for invalid bytes, MemoryError for size. A value that parses can still break the code that walks or
computes with it, for example by its depth. `json_value` and `toml_table` raise `Unreadable` for all of these.
"""

import contextlib
import functools
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deskside.utils.errors import RunError, UsageError, first_line

# Maximum depth of nested lists and objects; far below the recursion limit, so that functions can walk a value.
MAX_DEPTH = 100
MAX_DIGITS = 20  # of an integer: enough for 64 bits


class Unreadable(ValueError):
    """Text that is not valid JSON or TOML, or exceeds a limit of this module. The message is one line."""


def json_value(text: str | bytes | bytearray, big_integers: bool = False, finite: bool = False) -> Any:
    """Return the value of a JSON text; bytes must be UTF-8.

    Args:
        big_integers: Accept integers of more than `MAX_DIGITS`, which occur in the records of data sets, and as
            `model_max_length` in the tokenizer_config.json of transformers.
        finite: Reject NaN, infinities, and numbers with a fraction or exponent that are too large for a float.

    Raises Unreadable.
    """
    with _as_unreadable():
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = _decoder(big_integers, finite).decode(decoded)
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH:  # else it cannot be nested too deeply
        _check_depth(value)
    return value


@functools.cache
def _decoder(big_integers: bool, finite: bool) -> json.JSONDecoder:
    """Return the decoder of `json_value`. Making one takes as long as decoding a row of metrics.jsonl."""
    return json.JSONDecoder(
        parse_int=None if big_integers else _integer,
        parse_float=_finite if finite else None,
        parse_constant=_finite if finite else None,
    )


def toml_table(text: str | bytes) -> dict[str, Any]:
    """Return the top-level table of a TOML text; bytes must be UTF-8. Raises Unreadable."""
    with _as_unreadable():
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        table = tomllib.loads(decoded)
    _check_depth(table)
    if any(isinstance(leaf, int) and leaf.bit_length() > 64 for leaf in leaves(table)):
        raise Unreadable("it has an integer of more than 64 bits")
    return table


def read_json_object(path: Path, big_integers: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file. big_integers: see `json_value`.

    Raises UsageError if the file does not exist, and RunError if it cannot be read or is damaged.
    """
    try:
        content = json_value(path.read_bytes(), big_integers)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except Unreadable as error:
        raise RunError(f"{path} is damaged: it is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it does not hold a JSON object")
    return content


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested lists and objects, or a value itself. At most `MAX_DEPTH` levels, as parsed here."""
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


@contextlib.contextmanager
def _as_unreadable() -> Iterator[None]:
    """Turn every exception of a parser into Unreadable."""
    try:
        yield
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except MemoryError:
        raise Unreadable("it needs more memory than is available") from None
    except ValueError as error:
        raise Unreadable(_one_line(error)) from None


def _integer(digits: str) -> int:
    """Parse an integer for json.loads. Raises Unreadable if it is too long."""
    length = len(digits.lstrip("-"))
    if length > MAX_DIGITS:
        raise Unreadable(f"it has an integer of {length:,} digits, more than 64 bits hold")
    return int(digits)


def _finite(number: str) -> float:
    """Parse a number, "NaN" or "Infinity" for json.loads. Raises Unreadable if the value is not finite."""
    value = float(number)
    if not math.isfinite(value):
        raise Unreadable(f"it has a number that is not finite ({number[:40]})")
    return value


def _one_line(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start})"
    line = first_line(error)
    if line.startswith("Exceeds the limit"):  # of Python on the digits of an integer, 4300 by default
        return "it has an integer of more digits than Python reads"
    return line[:300]


def _check_depth(value: Any) -> None:
    """Raise Unreadable if lists and objects are nested too deeply."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep")
