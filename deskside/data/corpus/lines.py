"""Reading of lines from plain and compressed files, and parsing of very long JSON lines, in bounded memory.

A small archive can contain a line of many gigabytes. Files are therefore decompressed in small steps, and a line that
is longer than the caller's limit is skipped, and reported by number and size.

A very long JSON line is parsed without its long strings, and the text field is then unescaped piece by piece to UTF-8.
Python's own parser would need both the line and the string as `str`, each up to four times as large as in UTF-8.
"""

from __future__ import annotations

import codecs
import io
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from deskside.utils.parsing import json_value

CHUNK = 1 << 20  # bytes that are read or decoded at a time
LONG_LINE = 4 << 20  # bytes; a longer JSON line is parsed without its long strings
_LONG_STRING = 1 << 16  # bytes; a longer string of such a line is left out of the parsed text
# Bytes of a long line without its long strings. Limited, because Python's objects are far larger than their JSON.
_STRUCTURE_LIMIT = 16 << 20

# A zstd block of 4 bytes may decompress to 128 KiB, so this many bytes of input give at most 16 MiB of output.
_ZSTD_INPUT = 512
_ZSTD_WINDOW = 1 << 27  # bytes; the default limit of the zstd program


class DamagedArchiveError(ValueError):
    """A damaged compressed file. The message gives the reason."""


def iter_lines(
    path: Path, limit: int, too_long: Callable[[int, int], object], damaged: Callable[[int, str], object]
) -> Iterator[tuple[int, bytearray]]:
    """Yield the number (from 1) and the bytes of each line of a file, without its newline.

    The caller may clear a bytearray to free its memory.

    Args:
        limit: Maximum length of a line in bytes.
        too_long: Called with the number and the length of each longer line, which is not yielded.
        damaged: Called once if an archive is truncated or damaged, with the number of lines before the damage, which
            have all been yielded or reported, and the reason.

    Raises OSError if the file cannot be opened or read.
    """
    pending, length, number = bytearray(), 0, 1
    with path.open("rb") as file:
        read = _decompressor(file, path, limit)
        while True:
            try:
                chunk = read()
            except DamagedArchiveError as error:
                damaged(number - 1, str(error)[:120])
                return
            if not chunk:
                break
            *line_ends, rest = chunk.split(b"\n")
            for part in line_ends:
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


def _decompressor(file: BinaryIO, path: Path, limit: int) -> Callable[[], bytes]:
    """Return a function that returns the next decompressed bytes of a file, and b"" at its end."""
    name = path.name.lower()
    if name.endswith(".gz"):
        stream, damage = _open_gzip(file)

        def read() -> bytes:
            try:
                return stream.read(CHUNK)
            except (EOFError, damage, OSError) as error:  # gzip.BadGzipFile is an OSError without errno
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise DamagedArchiveError(str(error)) from error

        return read
    if name.endswith(".zst"):
        return _ZstdFrames(file, max(_ZSTD_WINDOW, 1 << (limit - 1).bit_length())).read
    return lambda: file.read(CHUNK)


def _open_gzip(file: BinaryIO) -> tuple[io.BufferedIOBase, Any]:
    """Return a stream of the decompressed bytes, and what it raises for damaged data besides EOFError and OSError."""
    try:
        # Intel's ISA-L, in a third of the time of zlib. It has wheels for x86-64 and ARM only.
        from isal import igzip, isal_zlib
    except ImportError:
        import gzip
        import zlib

        return gzip.GzipFile(fileobj=file, mode="rb"), zlib.error
    return igzip.IGzipFile(fileobj=file, mode="rb"), isal_zlib.error


class _ZstdFrames:
    """A reader of zstd frames. Unlike zstandard's own reader, it reports a truncated last frame."""

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
                    raise DamagedArchiveError("the last zstd frame is truncated")
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
    """Return the position of the first byte that is not UTF-8, or None. Decodes one chunk at a time, to save memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, max(1, len(data)), CHUNK):
        incomplete = len(decoder.getstate()[0])  # bytes of a character that began in the previous chunk
        try:
            decoder.decode(data[start : start + CHUNK], final=start + CHUNK >= len(data))
        except UnicodeDecodeError as error:
            return start - incomplete + error.start
    return None


def parse_long(line: bytes | bytearray, field: str) -> object:
    """Parse a long JSON line. If `field` of the top-level object is a long string, its value is UTF-8 bytes.

    Other long strings are replaced by a short placeholder.

    Raises ValueError if the line is not JSON or not UTF-8, or has more than 16 MiB besides long strings, and its
    subclass UnicodeEncodeError for a lone surrogate in a long `field`.
    """
    placeholder = uuid.uuid4().hex  # random, so that no string of the line can be equal to it
    spans: dict[str, tuple[int, int]] = {}
    short, copied, position = bytearray(), 0, 0
    while (start := line.find(b'"', position)) >= 0:
        end = _string_end(line, start)
        if end - start > _LONG_STRING:
            name = f"{placeholder}:{len(spans)}"
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
    """Return the position of the closing quote of the JSON string whose opening quote is at `start`."""
    end = line.find(b'"', start + 1)
    while end >= 0:
        if not _backslashes(line, start + 1, end) % 2:
            return end
        end = line.find(b'"', end + 1)
    raise ValueError("a string is not closed")


def _backslashes(line: bytes | bytearray, start: int, end: int) -> int:
    """Return the number of backslashes directly before `end`, not counting any before `start`."""
    # Look at 64 bytes first: copying the whole string for every quote would take quadratic time.
    window = max(start, end - 64)
    count = end - window - len(line[window:end].rstrip(b"\\"))
    if count == end - window > 0 and window > start:
        count = end - start - len(line[start:end].rstrip(b"\\"))
    return count


def _unescape(line: bytes | bytearray, start: int, end: int) -> bytes:
    """Return the UTF-8 bytes of the JSON string whose content is line[start:end]."""
    unescaped = bytearray()
    while start < end:
        cut = _cut(line, start, end)
        unescaped += json_value(b'"' + line[start:cut] + b'"').encode("utf-8")
        start = cut
    return bytes(unescaped)


def _cut(line: bytes | bytearray, start: int, end: int) -> int:
    """Return where a piece of a JSON string that starts at `start` can end: not inside an escape or character."""
    at = start + CHUNK
    if at + CHUNK >= end:
        return end
    slash = line.find(b"\\", at, at + CHUNK)
    if slash < 0:
        at += 16  # any escape that began before `at` ends before this: a pair of surrogates has 12 bytes
        while line[at] & 0xC0 == 0x80:
            at += 1
        return at
    if _backslashes(line, start, slash) % 2:
        return slash + 1  # this is the second of two backslashes that encode one
    escape = line[slash : slash + 4].lower()
    is_low_surrogate = escape in (b"\\udc", b"\\udd", b"\\ude", b"\\udf")
    return slash + 6 if is_low_surrogate else slash
