"""Messages between the judge and the solution: plain data as JSON, everything else as a numbered reference.

Decoding a message cannot execute code: pickle is not used, and types come from a fixed list.
"""

import builtins
import collections
import datetime
import json
import os
import struct
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

MESSAGE_BYTES = 1 << 22
REASON_CHARACTERS = 300
CHUNK = 256  # maximum items of the solution's iterators in one message
ENDED = "the code ended its process"
NOT_A_MESSAGE = "the code sent an invalid message"


class ProtocolError(Exception):
    """The other process ended, or sent an invalid message."""


class Channel:
    """A stream of messages over a socket: four bytes of length, then JSON."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def send(self, message: Any) -> None:
        """Send a message. Raises ValueError above MESSAGE_BYTES, ProtocolError if the other process has ended."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large (maximum {MESSAGE_BYTES})")
        view = memoryview(struct.pack("<I", len(data)) + data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                raise ProtocolError(ENDED) from error

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises ProtocolError at the end of the stream and for an invalid message."""
        (length,) = struct.unpack("<I", self._read_exactly(4))
        if length > MESSAGE_BYTES:
            raise ProtocolError(NOT_A_MESSAGE)
        data = self._read_exactly(length)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(NOT_A_MESSAGE) from error
        if not isinstance(message, dict):
            raise ProtocolError(NOT_A_MESSAGE)
        return message

    def _read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = os.read(self._descriptor, count - len(data))
            except OSError as error:
                raise ProtocolError(ENDED) from error
            if not part:
                raise ProtocolError(ENDED)
            data += part
        return bytes(data)


_SCALARS = (int, float, str)
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)}
# tag -> (type, the attributes that its constructor takes)
_BY_FIELDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "complex": (complex, ("real", "imag")),
    "range": (range, ("start", "stop", "step")),
    "fraction": (Fraction, ("numerator", "denominator")),
    "timedelta": (datetime.timedelta, ("days", "seconds", "microseconds")),
}
# tag -> (types that are sent as text, function to text, function from text)
_BY_TEXT: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": ((bytes, bytearray), lambda value: bytes(value).hex(), bytes.fromhex),
    "decimal": (Decimal, str, Decimal),
    # Before date, of which datetime is a subclass.
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
_BUILTIN_TYPES = {kind: name for name, kind in vars(builtins).items() if isinstance(kind, type)}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return `value` as JSON data. An instance of a subclass becomes its plain base; `refer` encodes other objects."""
    if value is None or isinstance(value, bool):
        return value
    for scalar in _SCALARS:
        if isinstance(value, scalar):
            return scalar(value)
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {tag: [encode(v, refer) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer), encode(v, refer)] for k, v in dict.items(value)]}
    for tag, (kind, fields) in _BY_FIELDS.items():
        if isinstance(value, kind):
            return {tag: [getattr(value, field) for field in fields]}
    for tag, (kind, write, _) in _BY_TEXT.items():
        if isinstance(value, kind):
            return {tag: write(value)}
    if isinstance(value, type) and value in _BUILTIN_TYPES:
        return {"type": _BUILTIN_TYPES[value]}
    return refer(value)


def decode(value: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """Return what `encode` was given; `resolve` gets the tag and the content of a reference.

    Raises ProtocolError for invalid data.
    """
    try:
        return _decode(value, resolve)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(f"the code sent an invalid value: {type(error).__name__}") from error


def _decode(value: Any, resolve: Callable[[str, Any], Any]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without a tag")
        return value
    ((tag, inner),) = value.items()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([_decode(v, resolve) for v in inner])
    if tag == "dict":
        return {_decode(k, resolve): _decode(v, resolve) for k, v in inner}
    if tag in _BY_FIELDS:
        kind, fields = _BY_FIELDS[tag]
        if len(inner) != len(fields):
            raise ValueError(f"a {tag} of {len(inner)} values")
        return kind(*inner)
    if tag in _BY_TEXT:
        return _BY_TEXT[tag][2](inner)
    if tag == "type":
        builtin = getattr(builtins, inner)
        if not isinstance(builtin, type):
            raise ValueError(f"{inner} is not a type")
        return builtin
    if tag == "iterator":
        return iter([_decode(v, resolve) for v in inner])
    return resolve(tag, inner)


def encode_iterator(value: Iterator[Any], refer: Callable[[Any], Any]) -> Any:
    """Encode an iterator of the tests as the list of its items, so that the solution need not request them."""
    return {"iterator": [encode(v, refer) for v in value]}


def error_message(error: BaseException) -> dict[str, Any]:
    """Return the message for an exception: the names of its class and base classes in order, and its text."""
    text = _text(error)
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        text = error.args[0]  # str() of a KeyError has quotes, which the new exception adds again
    return {"error": [kind.__name__ for kind in type(error).__mro__], "text": text[:REASON_CHARACTERS]}


# Python's loops, generators and coroutines treat these specially. Raised by the solution, one of them could end a loop
# of the tests early. So it becomes a RuntimeError, as PEP 479 does for a StopIteration raised in a generator.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit)


def exception_from(message: dict[str, Any], known: dict[str, type[BaseException]]) -> BaseException:
    """Return the exception of an error message. Its class is the first one that is in `known` or built in."""
    text = str(message.get("text", ""))[:REASON_CHARACTERS]
    names = message["error"]
    if not isinstance(names, list):
        raise ProtocolError(NOT_A_MESSAGE)
    for name in names:
        kind: Any = known.get(str(name)) or getattr(builtins, str(name), None)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            continue
        if issubclass(kind, _CONTROL_FLOW) or kind is BaseException:
            break
        try:
            return kind(text)
        except TypeError:  # needs more arguments: try its base class
            continue
    return RuntimeError(text)


def described(error: BaseException) -> str:
    """Return the class name and the text of an exception."""
    return f"{type(error).__name__}: {_text(error)}"[:REASON_CHARACTERS]


def _text(error: BaseException) -> str:
    """Return the text of an exception; empty if `__str__` raises."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - __str__ of an exception that a model wrote
        return ""
