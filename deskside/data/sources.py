"""Where text comes from: files, directories, globs, the Hugging Face hub and the bundled samples.

A source is named by a *spec string*:

    book.txt                       the whole file is one document
    a.jsonl  a.jsonl.gz  a.jsonl.zst   one JSON object per line, the text under one field
    a.parquet                      one row per document, the text in one column
    a/directory   "a/*.jsonl.gz"   every file of these kinds in it, sorted by name
    hf:owner/name[:config[:split]] streamed through `datasets`
    bundled:tiny_shakespeare.txt   a file that comes with deskside

Whatever cannot be read is given to a `BadInputLog`, which either counts it and goes on ("skip") or stops with one line
that names it ("refuse"). Nothing is dropped without being counted.
"""

from __future__ import annotations

import glob as globbing
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, Literal

from deskside.errors import UsageError

OnBad = Literal["skip", "refuse"]

# What can be wrong with input, in the words that a person reads.
NOT_UTF8 = "not UTF-8"
EMPTY = "empty document"
TRUNCATED = "truncated or damaged file"
BAD_JSON = "JSON that does not parse"
NO_FIELD = "JSON without the field"
NOT_TEXT = "the field is not text"
NO_COLUMN = "parquet without the column"
MISSING = "missing or unreadable file or folder"

_KINDS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_CHUNK = 1 << 20
_EXAMPLES = 5


@dataclass(slots=True)
class Document:
    """One document. `source` and `lang` are tags for mixtures ("" where the record has none); origin is file:line."""

    text: str
    source: str
    lang: str
    origin: str


@dataclass
class BadInputLog:
    """Counts bad input by reason and keeps the first few places, or refuses it at once.

    Raises:
        UsageError: from `add`, when `on_bad` is "refuse".
    """

    on_bad: OnBad = "skip"
    remedy: str = "Mend it, or skip and count such input with --on-bad skip."
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, origin: str, detail: str = "") -> None:
        where = f"{origin} ({detail})" if detail else origin
        if self.on_bad == "refuse":
            raise UsageError(f"{where}: {reason}. {self.remedy}")
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(where)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def firsts(self) -> str:
        """Every reason with its count and its first place, in one line."""
        return "; ".join(
            f"{n} x {reason}, first {self.examples[reason][0]}" for reason, n in self.counts.items()
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            reason: {"count": n, "first": self.examples[reason]} for reason, n in sorted(self.counts.items())
        }


@dataclass(frozen=True)
class Source:
    """A resolved spec: the files behind it in reading order, or a data set on the hub.

    `tag` stands for a document whose record has no `source` of its own.
    """

    spec: str
    tag: str
    paths: tuple[Path, ...] = ()
    hub: tuple[str, str | None, str] | None = None  # name, config, split
    ignored: tuple[str, ...] = ()  # files of other kinds in a directory or glob
    unreadable: tuple[tuple[str, str], ...] = ()  # directories inside that cannot be listed, and why

    def identity(self) -> list[Any]:
        """What decides the text: names and sizes of the files, wherever they lie. Tells whether inputs changed."""
        if self.hub is not None:
            return [self.spec]
        return [[p.name, p.stat().st_size if p.exists() else -1] for p in self.paths]

    @classmethod
    def parse(cls, spec: str) -> Source:
        """Resolves a spec string.

        Raises:
            UsageError: the spec cannot name a source (unknown kind of file, nothing matches, unknown bundled name).
        """
        if not spec:
            raise UsageError("'': an empty text names no source.")
        if spec.startswith("hf:"):
            return _parse_hub(spec)
        if spec.startswith("bundled:"):
            return _parse_bundled(spec)
        path = Path(spec).expanduser()
        if path.is_dir():
            found, unreadable = _walk(path)
            return _of_files(spec, path.resolve().name, found, f"in directory {spec}", unreadable)
        if not path.exists() and any(c in spec for c in "*?["):
            found = sorted(Path(p) for p in globbing.glob(str(path), recursive=True) if os.path.isfile(p))
            return _of_files(spec, path.parent.resolve().name, found, f"match {spec}")
        if kind_of(path) is None:
            raise UsageError(
                f"{spec}: not a kind of source that is known. Known: {', '.join(_KINDS)}, a directory, hf:, bundled:."
            )
        if path.exists() and not path.is_file():
            raise UsageError(f"{spec}: is no regular file, and data is read twice. Write it to a file first.")
        return cls(spec, _stem(path), (path,))


def kind_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for kind in _KINDS if name.endswith(kind)), None)


def _stem(path: Path) -> str:
    kind = kind_of(path) or ""
    return path.name[: len(path.name) - len(kind)] or path.name


def _walk(folder: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Every file below `folder`, sorted, and every directory that cannot be listed."""
    unreadable: list[tuple[str, str]] = []

    def note(error: OSError) -> None:
        unreadable.append((str(error.filename), error.strerror or ""))

    found = [Path(place, name) for place, _, names in os.walk(folder, onerror=note) for name in names]
    return sorted(p for p in found if p.is_file()), sorted(unreadable)


def _of_files(
    spec: str, tag: str, found: list[Path], where: str, unreadable: Sequence[tuple[str, str]] = ()
) -> Source:
    known = tuple(p for p in found if kind_of(p))
    if not known:
        also = "".join(f" {place} cannot be read ({reason})." for place, reason in unreadable[:1])
        raise UsageError(f"no files {where}. Known kinds: {', '.join(_KINDS)}.{also}")
    ignored = tuple(str(p) for p in found if not kind_of(p))
    return Source(spec, tag, known, ignored=ignored, unreadable=tuple(unreadable))


def _parse_hub(spec: str) -> Source:
    parts = spec.removeprefix("hf:").split(":")
    if len(parts) > 3 or parts[0].count("/") != 1 or not all(parts[0].split("/")):
        raise UsageError(f"{spec}: write hf:owner/name, hf:owner/name:config or hf:owner/name:config:split.")
    config = parts[1] if len(parts) > 1 and parts[1] else None
    split = parts[2] if len(parts) > 2 and parts[2] else "train"
    return Source(spec, parts[0], hub=(parts[0], config, split))


def _parse_bundled(spec: str) -> Source:
    name = spec.removeprefix("bundled:")
    folder = Path(str(files("deskside.data") / "bundled"))
    names = sorted(p.name for p in folder.iterdir() if kind_of(p))
    if name not in names:
        raise UsageError(f"{spec}: no such bundled text. Bundled: {', '.join(names)}.")
    return Source(spec, _stem(Path(name)), (folder / name,))


def iter_documents(source: Source, bad: BadInputLog, *, text_field: str = "text") -> Iterator[Document]:
    """Yields the documents of one source in a fixed order; bad input goes to `bad`.

    Raises:
        UsageError: bad input while `bad.on_bad` is "refuse", or a hub data set that cannot be reached.
    """
    if source.hub is not None:
        yield from _iter_hub(source, bad, text_field)
        return
    for place, reason in source.unreadable:
        bad.add(MISSING, place, reason)
    for path in source.paths:
        kind = kind_of(path)
        try:
            if kind == ".txt":
                yield from _iter_text(path, source.tag, bad)
            elif kind == ".parquet":
                yield from _iter_parquet(path, source.tag, bad, text_field)
            else:
                yield from _iter_jsonl(path, source.tag, bad, text_field)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            bad.add(MISSING, str(path), error.strerror or "")


def _iter_text(path: Path, tag: str, bad: BadInputLog) -> Iterator[Document]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad.add(NOT_UTF8, str(path), f"byte {error.start}")
        return
    if not text.strip():
        bad.add(EMPTY, str(path))
        return
    yield Document(text, tag, "", str(path))


def _iter_jsonl(path: Path, tag: str, bad: BadInputLog, text_field: str) -> Iterator[Document]:
    for origin, record in iter_json(path, bad):
        yield from _of_record(record, tag, origin, bad, text_field)


def iter_json(path: Path, bad: BadInputLog) -> Iterator[tuple[str, object]]:
    """The lines of a .jsonl file as (file:line, value); what is not JSON in UTF-8 goes to `bad`."""
    for number, raw in enumerate(iter_lines(path, bad), start=1):
        origin = f"{path}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            bad.add(NOT_UTF8, origin, f"byte {error.start} of the line")
            continue
        if not line.strip():
            continue  # a blank line holds no record, so nothing is lost
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.add(BAD_JSON, origin, str(error)[:80])
            continue
        yield origin, value


def _of_record(
    record: object, tag: str, origin: str, bad: BadInputLog, text_field: str
) -> Iterator[Document]:
    if not isinstance(record, dict) or text_field not in record:
        keys = ", ".join(list(record)[:6]) if isinstance(record, dict) else type(record).__name__
        bad.add(NO_FIELD, origin, f"wanted {text_field!r}, has {keys}")
        return
    text = record[text_field]
    if not isinstance(text, str):
        bad.add(NOT_TEXT, origin, f"{text_field!r} is {type(text).__name__}")
        return
    if not text.strip():
        bad.add(EMPTY, origin)
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON may hold half of a surrogate pair, which no UTF-8 can
        bad.add(NOT_UTF8, origin, "lone surrogate")
        return
    yield Document(text, tag_of(record.get("source")) or tag, tag_of(record.get("lang")), origin)


def tag_of(value: object) -> str:
    """The tag of a `source` or `lang` value: what stands before the first colon ("wiki:Page:3" -> "wiki")."""
    if not isinstance(value, str):
        return ""
    return value.split(":", 1)[0].encode("utf-8", "replace").decode("utf-8")


def iter_lines(path: Path, bad: BadInputLog) -> Iterator[bytes]:
    """Lines without their newline. A damaged archive yields every whole line before the damage, then is reported."""
    import zstandard

    rest = b""
    lines = 0
    with path.open("rb") as file:
        stream = _decompressed(file, path)
        while True:
            try:
                chunk = stream.read(_CHUNK)
            except (EOFError, zlib.error, zstandard.ZstdError, OSError) as error:
                # gzip.BadGzipFile is an OSError without errno; one with errno is the disk's own trouble.
                detail = str(error)[:80]
                bad.add(TRUNCATED, str(path), f"after line {lines}: {detail}")
                return
            if not chunk:
                break
            whole = (rest + chunk).split(b"\n")
            rest = whole.pop()
            for line in whole:
                lines += 1
                yield line
        if rest:
            yield rest


def _decompressed(file: BinaryIO, path: Path) -> BinaryIO:
    name = path.name.lower()
    if name.endswith(".gz"):
        import gzip

        return gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[return-value]
    if name.endswith(".zst"):
        return _ZstdFrames(file)  # type: ignore[return-value]
    return file


class _ZstdFrames(io.RawIOBase):
    """Reads zstd frames and, unlike zstandard's own reader, says so when the last frame is cut short."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._in_frame = False
        self._pending = b""

    def read(self, size: int = -1) -> bytes:
        while True:
            raw = self._pending or self._file.read(_CHUNK)
            self._pending = b""
            if not raw:
                if self._in_frame:
                    raise EOFError("the last zstd frame is cut short")
                return b""
            out = self._frame.decompress(raw)
            self._in_frame = True
            if self._frame.eof:
                self._pending = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
                self._in_frame = False
            if out:
                return out


def _iter_parquet(path: Path, tag: str, bad: BadInputLog, text_field: str) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise FileNotFoundError(2, "No such file", str(path))
    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        bad.add(TRUNCATED, str(path), str(error)[:80])
        return
    with table:
        schema = table.schema_arrow
        if text_field not in schema.names:
            bad.add(NO_COLUMN, str(path), f"wanted {text_field!r}, has {', '.join(schema.names[:6])}")
            return
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            bad.add(NOT_TEXT, str(path), f"column {text_field!r} is {kind}")
            return
        columns = [text_field, *(c for c in ("source", "lang") if c in schema.names and c != text_field)]
        row = 0
        try:
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                # As bytes, so that one row that is not UTF-8 is named by itself and the others are kept.
                texts = batch.column(text_field).cast(pa.large_binary()).to_pylist()
                tags = {c: batch.column(c).to_pylist() for c in columns[1:]}
                for i, raw in enumerate(texts):
                    row += 1
                    origin = f"{path}:{row}"
                    try:
                        text = raw.decode("utf-8") if raw is not None else None
                    except UnicodeDecodeError as error:
                        bad.add(NOT_UTF8, origin, f"byte {error.start}")
                        continue
                    record = {c: values[i] for c, values in tags.items()}
                    yield from _of_record({**record, text_field: text}, tag, origin, bad, text_field)
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            bad.add(TRUNCATED, str(path), f"after row {row}: {str(error)[:80]}")


def _iter_hub(source: Source, bad: BadInputLog, text_field: str) -> Iterator[Document]:
    for row, record in enumerate(iter_hub_rows(source), start=1):
        yield from _of_record(record, source.tag, f"{source.spec}:{row}", bad, text_field)


def iter_hub_rows(source: Source) -> Iterator[Any]:
    """The rows of a hub data set, streamed. Raises UsageError when it cannot be read."""
    import datasets

    assert source.hub is not None
    name, config, split = source.hub
    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    except (OSError, ValueError) as error:  # datasets' own errors are of these two families
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise UsageError(
            f"{source.spec}: the hub's data set cannot be read ({reason}). Check the name, config and split and the "
            "network; without a network, download its files elsewhere and give their paths instead."
        ) from error
