"""The base class of the readers of sources: it opens files and hub data sets, and parses the lines of .jsonl files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from deskside.data.corpus.bad_input import (
    BAD_JSON,
    DAMAGED_FILE,
    MISSING,
    NOT_UTF8,
    TOO_LONG,
    BadInputLog,
    short_reason,
)
from deskside.data.corpus.lines import LONG_LINE, iter_lines, parse_long, utf8_error
from deskside.data.corpus.sources import TEXT_KINDS, Source, kind_of
from deskside.utils.errors import UsageError, first_line
from deskside.utils.parsing import json_value

LINE_LIMIT = 256_000_000  # bytes of one line, text file, parquet cell or hub row
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # written by some programs at the beginning of a UTF-8 file
Item = TypeVar("Item")


class Reader(ABC, Generic[Item]):
    """Reads the items of a source. A subclass turns records, text files and parquet files into items.

    long_field: a field of a .jsonl record that `parse_long` may return as UTF-8 bytes, or None.
    """

    long_field: str | None = None

    def __init__(self, bad: BadInputLog, line_limit: int = LINE_LIMIT) -> None:
        self.bad, self.line_limit = bad, line_limit

    def items(self, source: Source) -> Iterator[Item]:
        """Yield the items of one source in a fixed order. Bad input is added to the log."""
        if source.hub is not None:
            for row, record in enumerate(_hub_rows(source), start=1):
                yield from self.record(record, source.tag, f"{source.spec}:{row}", source.spec)
            return
        for folder, reason in source.unreadable:
            self.bad.add(MISSING, folder, reason)
        for path in source.paths:
            kind = kind_of(path)
            try:
                if kind in TEXT_KINDS:
                    yield from self.text(path, source)
                elif kind == ".parquet":
                    if not path.exists():
                        raise FileNotFoundError(2, "No such file", str(path))
                    yield from self.parquet(path, source.tag)
                else:
                    yield from self.jsonl(path, source.tag)
            except OSError as error:  # missing, forbidden, a folder, a loop of links, an unreadable disk
                self.bad.add(MISSING, str(path), error.strerror or str(error))

    def jsonl(self, path: Path, tag: str) -> Iterator[Item]:
        """Yield the items of a .jsonl file. tag: the source tag of records without a `source`."""
        bad, limit = self.bad, self.line_limit
        lines = iter_lines(
            path,
            limit,
            lambda number, size: bad.add(TOO_LONG, f"{path}:{number}", f"{size:,} bytes, at most {limit:,}"),
            lambda number, reason: bad.add(DAMAGED_FILE, str(path), f"after line {number}: {reason}"),
        )
        for number, raw in lines:
            origin = f"{path}:{number}"
            parsed = _parse(raw, number, origin, bad, self.long_field)
            if parsed is not None:
                yield from self.record(parsed[0], tag, origin, str(path))

    @abstractmethod
    def record(self, record: object, tag: str, origin: str, group: str) -> Iterator[Item]:
        """Yield the item of a JSON value, or nothing if it is bad input. origin, group: see `documents.Document`."""

    @abstractmethod
    def text(self, path: Path, source: Source) -> Iterator[Item]:
        """Yield the items of a text file."""

    @abstractmethod
    def parquet(self, path: Path, tag: str) -> Iterator[Item]:
        """Yield the items of a parquet file that exists."""


def _parse(
    raw: bytearray, number: int, origin: str, bad: BadInputLog, field: str | None
) -> tuple[object] | None:
    """Return the JSON value of a line in a tuple, because the value may be None. Return None if it is invalid or blank.

    field: if given, a long line is parsed with `parse_long`. Clears `raw` to free its memory.
    """
    try:
        if number == 1 and raw.startswith(BYTE_ORDER_MARK):
            del raw[: len(BYTE_ORDER_MARK)]
        if field is not None and len(raw) > LONG_LINE:
            if (position := utf8_error(raw)) is not None:
                bad.add(NOT_UTF8, origin, f"byte {position} of the line")
                return None
            return (parse_long(raw, field),)
        line = raw.decode("utf-8")
        if not line.strip():
            return None  # a blank line is not a record
        return (json_value(line, big_integers=True),)
    except UnicodeDecodeError as error:
        bad.add(NOT_UTF8, origin, f"byte {error.start} of the line")
    except UnicodeEncodeError:
        bad.add(NOT_UTF8, origin, "lone surrogate")
    except ValueError as error:
        bad.add(BAD_JSON, origin, short_reason(error))
    finally:
        raw.clear()
    return None


def _hub_rows(source: Source) -> Iterator[Any]:
    """Stream the rows of a hub data set. Raises UsageError if it cannot be read."""
    import datasets

    assert source.hub is not None
    name, config, split = source.hub
    try:
        yield from map(without_nulls, datasets.load_dataset(name, config, split=split, streaming=True))
    except (OSError, ValueError) as error:  # the base classes of the errors of `datasets`
        raise UsageError(
            f"{source.spec}: the hub's data set cannot be read ({first_line(error)[:160]}). Check the name, config and "
            "split and the network; without a network, download its files elsewhere and give their paths instead."
        ) from error


def damaged_parquet() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises for a parquet file that is damaged, or of a kind that it cannot read."""
    import pyarrow as pa

    return pa.ArrowException, OSError, UnicodeDecodeError


def tag_of(value: object) -> str:
    """Return the tag of a `source` or `lang` value: the part before the first colon ("wiki:Page:3" -> "wiki")."""
    if not isinstance(value, str):
        return ""
    return value.split(":", 1)[0].encode("utf-8", "replace").decode("utf-8")  # without lone surrogates


def without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a table without the nulls in its structs.

    All structs of a column have the same fields, such as the arguments of the calls of all tools, and null for those
    that an object did not have.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: clean(part) for name, part in value.items() if part is not None}
        return [clean(part) for part in value] if isinstance(value, list) else value

    return {name: clean(value) for name, value in record.items()}
