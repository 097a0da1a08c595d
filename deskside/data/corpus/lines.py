"""Bounded-memory reading of lines from plain and compressed files, and of text fields in very long JSON lines.

A small archive can hold a line of many gigabytes. Files are therefore decompressed in small steps, and a line
longer than the caller's limit is skipped but reported by number and size.

A JSON line of 100 MB is parsed without its long strings, which are unescaped piece by piece to UTF-8. Python's own
parser would hold the line and the string as `str`, each up to four times as large as in UTF-8.
"""

from __future__ import annotations

import codecs
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from deskside.utils.parsing import json_value

CHUNK = 1 << 20  # bytes that are read or decoded at a time
LONG_LINE = 4 << 20  # from here on a JSON line is parsed without its long strings
_LONG_STRING = 1 << 16
_STRUCTURE_LIMIT = (
    16 << 20
)  # a parsed line without its long strings: objects take far more memory than their JSON

# A zstd block holds up to 128 KiB and may be compressed to 4 bytes, so this much input gives at most 16 MiB.
_ZSTD_INPUT = 512
_ZSTD_WINDOW = 1 << 27  # what the zstd program accepts without --long=31


class DamagedArchiveError(ValueError):
    """A damaged compressed file. The message gives the reason."""


def iter_lines(
    path: Path, limit: int, too_long: Callable[[int, int], object], damaged: Callable[[int, str], object]
) -> Iterator[tuple[int, bytearray]]:
    """Yield the number (from 1) and the bytes of each line of a file, without its newline.

    Args:
        limit: Maximum length of a line in bytes.
        too_long: Called with the number and the length of each longer line, which is not yielded.
        damaged: Called with the number of lines before the damage and the reason, where an archive is cut short or
            damaged. Every line before it has been yielded.

    The caller may clear the bytearray to free its memory.

    Raises:
        OSError: the file cannot be opened or read.
    """
    pending, length, number = bytearray(), 0, 1
    with path.open("rb") as file:
        read = _reader(file, path, limit)
        while True:
            try:
                chunk = read()
            except DamagedArchiveError as error:
                damaged(number - 1, str(error)[:120])
                return
            if not chunk:
                break
            *ended, rest = chunk.split(b"\n")
            for part in ended:
                length += len(part)
                if length > limit:
                    too_long(number, length)
                elif pending:
                    pending += part
                    yield number, pending
                else:
                    yield number, bytearray(part)
                pending, length, number = bytearray(), 0, number + 1
            length += len(rest)
            if length > limit:
                pending = bytearray()
            else:
                pending += rest
    if length > limit:
        too_long(number, length)
    elif pending:
        yield number, pending


def _reader(file: BinaryIO, path: Path, limit: int) -> Callable[[], bytes]:
    """Return a function that returns the next decompressed bytes, and b"" at the end."""
    name = path.name.lower()
    if name.endswith(".gz"):
        import gzip

        stream = gzip.GzipFile(fileobj=file, mode="rb")

        def read() -> bytes:
            try:
                return stream.read(CHUNK)
            except (EOFError, zlib.error, OSError) as error:  # gzip.BadGzipFile is an OSError without errno
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise DamagedArchiveError(str(error)) from error

        return read
    if name.endswith(".zst"):
        return _ZstdFrames(file, max(_ZSTD_WINDOW, 1 << (limit - 1).bit_length())).read
    return lambda: file.read(CHUNK)


class _ZstdFrames:
    """A reader of zstd frames that reports a truncated last frame, which zstandard's own reader does not."""

    def __init__(self, file: BinaryIO, max_window: int) -> None:
        import zstandard

        self._file = file
        self._error = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=max_window)
        self._frame = self._decompressor.decompressobj()
        self._in_frame = False
        self._unused = b""

    def read(self) -> bytes:
        while True:
            data = self._unused or self._file.read(_ZSTD_INPUT)
            self._unused = b""
            if not data:
                if self._in_frame:
                    raise DamagedArchiveError("the last zstd frame is cut short")
                return b""
            try:
                out = self._frame.decompress(data)
            except self._error as error:
                hint = "; its window is larger than --max-line-mb" if "memory" in str(error) else ""
                raise DamagedArchiveError(f"{error}{hint}") from error
            self._in_frame = True
            if self._frame.eof:
                self._unused = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
                self._in_frame = False
            if out:
                return out


def utf8_error(data: bytes | bytearray) -> int | None:
    """Return the position of the first byte that is not UTF-8, or None. Holds one chunk as `str` at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, max(1, len(data)), CHUNK):
        kept = len(decoder.getstate()[0])
        try:
            decoder.decode(data[start : start + CHUNK], final=start + CHUNK >= len(data))
        except UnicodeDecodeError as error:
            return start - kept + error.start
    return None


def parse_long(line: bytes | bytearray, field: str) -> object:
    """Parse a long line; if `field` of the top-level object is a long string, it is returned as UTF-8 bytes.

    Other long strings are replaced by a short placeholder.

    Raises: ValueError: not JSON, or more than 16 MiB of it besides long strings. UnicodeDecodeError for bytes that
    are not UTF-8 and UnicodeEncodeError for a lone surrogate in `field` are ValueErrors too.
    """
    mark = uuid.uuid4().hex  # no string of the line can be equal to a placeholder
    spans: dict[str, tuple[int, int]] = {}
    short, copied, position = bytearray(), 0, 0
    while (start := line.find(b'"', position)) >= 0:
        end = _string_end(line, start)
        if end - start > _LONG_STRING:
            name = f"{mark}:{len(spans)}"
            spans[name] = (start + 1, end)
            short += line[copied:start] + f'"{name}"'.encode()
            copied = end + 1
        position = end + 1
        if len(short) + position - copied > _STRUCTURE_LIMIT:
            break
    if len(short) + len(line) - copied > _STRUCTURE_LIMIT:
        raise ValueError(f"more than {_STRUCTURE_LIMIT >> 20} MiB of JSON besides long strings")
    short += line[copied:]
    value = json_value(short, big_integers=True)
    if isinstance(value, dict) and isinstance(value.get(field), str) and value[field] in spans:
        value[field] = _unescape(line, *spans[value[field]])
    return value


def _string_end(line: bytes | bytearray, start: int) -> int:
    """Return the position of the quote that closes the JSON string which opens at `start`."""
    end = line.find(b'"', start + 1)
    while end >= 0:
        if not _backslashes(line, start + 1, end) % 2:
            return end
        end = line.find(b'"', end + 1)
    raise ValueError("a string is not closed")


def _backslashes(line: bytes | bytearray, start: int, end: int) -> int:
    """Return the number of backslashes directly before `end`, looking back to `start`."""
    window = max(start, end - 64)
    count = end - window - len(line[window:end].rstrip(b"\\"))
    if count == end - window > 0 and window > start:
        count = end - start - len(line[start:end].rstrip(b"\\"))
    return count


def _unescape(line: bytes | bytearray, start: int, end: int) -> bytes:
    """Return the UTF-8 bytes of the JSON string whose content is line[start:end]."""
    found = bytearray()
    while start < end:
        cut = _cut(line, start, end)
        found += json_value(b'"' + line[start:cut] + b'"').encode("utf-8")
        start = cut
    return bytes(found)


def _cut(line: bytes | bytearray, start: int, end: int) -> int:
    """Return where a piece that begins at `start` can end: outside escapes, surrogate pairs and characters."""
    at = start + CHUNK
    if at + CHUNK >= end:
        return end
    slash = line.find(b"\\", at, at + CHUNK)
    if slash < 0:
        at += 16  # an escape that began before `at` has ended by now
        while line[at] & 0xC0 == 0x80:
            at += 1
        return at
    if _backslashes(line, start, slash) % 2:
        return slash + 1  # it is the second of a pair of backslashes
    low = line[slash : slash + 2] == b"\\u" and line[slash + 2 : slash + 4].lower() in (
        b"dc",
        b"dd",
        b"de",
        b"df",
    )
    return slash + 6 if low else slash
