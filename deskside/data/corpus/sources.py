"""Sources of text: files, directories, globs, the Hugging Face hub and the bundled samples.

A source is given as a *spec string*:

    book.txt  notes.md             the whole file is one document
    a.jsonl  a.jsonl.gz  a.jsonl.zst   one JSON object per line, the text under one field
    a.parquet                      one row per document, the text in one column
    a/directory   "a/*.jsonl.gz"   every file of these kinds, sorted by path, except README.md
    hf:owner/name[:config[:split]] streamed through `datasets`
    bundled:tiny_shakespeare.txt   a file that comes with deskside

Input that cannot be read is reported to a `BadInputLog`, which either counts it ("skip") or raises an error that names
it ("refuse"). No document is left out without being counted.

`line_limit` limits the bytes of a line or document, and so the memory. A longer line, parquet cell or hub row is bad
input; a longer text file is read as several documents, cut at ends of lines if it has any.
"""

from __future__ import annotations

import codecs
import glob as globbing
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.lines import CHUNK, LONG_LINE, iter_lines, parse_long, utf8_error
from deskside.utils.errors import UsageError
from deskside.utils.parsing import json_value

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# Kinds of bad input, as shown to the user.
NOT_UTF8 = "not UTF-8"
EMPTY = "empty document"
DAMAGED_FILE = "truncated or damaged file"
BAD_JSON = "JSON that does not parse"
NO_FIELD = "JSON without the field"
NOT_TEXT = "the field is not text"
NO_COLUMN = "parquet without the column"
MISSING = "missing or unreadable file or folder"
TOO_LONG = "longer than the limit (see --max-line-mb)"
BINARY = "binary data, not text"

TEXT_KINDS = (".txt", ".md")
_KINDS = (*TEXT_KINDS, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
LINE_LIMIT = 256_000_000  # bytes of one line, text file, parquet cell or hub row
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # written by some programs at the beginning of a UTF-8 file
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF16 = "it is UTF-16; convert it with iconv -f UTF-16 -t UTF-8"
_START = 64  # bytes of a document in which something else than white space is looked for first
_PARQUET_BATCH = 8 << 20  # bytes of rows read at a time, by their average size
_BINARY_SHARE = 0.1  # share of control characters in binary data; text has almost none

# Control characters that do not occur in text, unlike tab, line and page breaks, backspace and escape.
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))

# How to convert file types that contain text in another form.
_HINTS = {
    ".pdf": "convert it to text first, for example with pdftotext",
    **dict.fromkeys(
        (".docx", ".odt", ".epub", ".html", ".htm", ".rtf"),
        "convert it to text first, for example with pandoc -t plain",
    ),
    ".json": "write one JSON object per line as .jsonl",
    **dict.fromkeys((".csv", ".tsv"), "write it as .jsonl or .parquet with the text in one field"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack it first"),
}


@dataclass(slots=True)
class Document:
    """A document as UTF-8; as `str` it could need four times the memory.

    source, lang: tags for mixtures, or "". origin: where it was read, such as file:line. group: the .jsonl or .parquet
    file that it is in, otherwise its source's spec.
    """

    data: bytes
    source: str
    lang: str
    origin: str
    group: str = ""

    @property
    def text(self) -> str:
        """The document as `str`."""
        return self.data.decode("utf-8")


@dataclass(frozen=True)
class Source:
    """A resolved spec: its files in reading order, or a data set on the hub.

    tag: the source tag of documents whose record has no `source` field. lang: their language if it is known.
    """

    spec: str
    tag: str
    paths: tuple[Path, ...] = ()
    hub: tuple[str, str | None, str] | None = None  # name, config, split
    ignored: tuple[str, ...] = ()  # files of other kinds in a directory or glob
    unreadable: tuple[tuple[str, str], ...] = ()  # subdirectories that cannot be listed, with the reason
    lang: str = ""

    def identity(self) -> list[Any]:
        """Return the language, and the files' names and sizes without location, to detect changed inputs."""
        lang = [f"{self.lang}="] if self.lang else []
        if self.hub is not None:
            return [*lang, self.spec]
        return [*lang, *([p.name, p.stat().st_size if p.exists() else -1] for p in self.paths)]

    @classmethod
    def parse(cls, spec: str) -> Source:
        """Resolve a spec string. Raises UsageError if it does not name a source."""
        if not spec:
            raise UsageError(
                "'': an empty text names no source; give a file, a directory, hf:owner/name or bundled:NAME."
            )
        if spec.startswith("hf:"):
            name, *rest = spec.removeprefix("hf:").split(":")
            if len(rest) > 2 or name.count("/") != 1 or not all(name.split("/")):
                raise UsageError(
                    f"{spec}: write hf:owner/name, hf:owner/name:config or hf:owner/name:config:split."
                )
            config, split = [*rest, "", ""][:2]
            return cls(spec, name, hub=(name, config or None, split or "train"))
        if spec.startswith("bundled:"):
            name = spec.removeprefix("bundled:")
            folder = Path(str(files("deskside.data") / "bundled"))
            names = sorted(p.name for p in folder.iterdir() if kind_of(p))
            if name not in names:
                raise UsageError(f"{spec}: no such bundled text. Bundled: {', '.join(names)}.")
            return cls(spec, _stem(Path(name)), (folder / name,))
        path = Path(spec).expanduser()
        if path.is_dir():
            paths, unreadable = _walk(path)
            return _from_files(spec, path.resolve().name, paths, f"in directory {spec}", unreadable)
        if not path.exists() and any(c in spec for c in "*?["):
            paths = sorted(Path(p) for p in globbing.glob(str(path), recursive=True) if os.path.isfile(p))
            return _from_files(spec, path.parent.resolve().name, paths, f"match {spec}")
        if kind_of(path) is None and not path.exists():
            raise UsageError(f"{spec}: no such file or directory.")
        if kind_of(path) is None:
            hint = _HINTS.get(path.suffix.lower())
            raise UsageError(
                f"{spec}: unsupported file type{f'; {hint}' if hint else ''}. "
                f"Supported: {', '.join(_KINDS)}, a directory, hf:, bundled:."
            )
        if path.exists() and not path.is_file():
            raise UsageError(
                f"{spec}: is not a regular file, but data is read twice. Write the data to a file first."
            )
        return cls(spec, _stem(path), (path,))


def kind_of(path: Path) -> str | None:
    """Return the supported suffix of a file name, such as ".jsonl.gz", or None."""
    name = path.name.lower()
    return next((kind for kind in _KINDS if name.endswith(kind)), None)


def _stem(path: Path) -> str:
    kind = kind_of(path) or ""
    return path.name[: len(path.name) - len(kind)] or path.name


def _walk(folder: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the sorted files below `folder`, and the directories that cannot be listed with the reason."""
    unreadable: list[tuple[str, str]] = []

    def on_error(error: OSError) -> None:
        unreadable.append((str(error.filename), error.strerror or ""))

    paths = [Path(parent, name) for parent, _, names in os.walk(folder, onerror=on_error) for name in names]
    return sorted(p for p in paths if p.is_file()), sorted(unreadable)


def _from_files(
    spec: str, tag: str, paths: list[Path], where: str, unreadable: Sequence[tuple[str, str]] = ()
) -> Source:
    """Return the source of the files of supported kinds. Raises UsageError if there is none.

    where: says in the message which files were looked for.
    """
    # README.md describes a data set.
    supported = tuple(p for p in paths if kind_of(p) and p.name.lower() != "readme.md")
    if not supported:
        details = [f" {folder} cannot be read ({reason})." for folder, reason in unreadable[:1]]
        hints = [f" {p.name}: {_HINTS[p.suffix.lower()]}." for p in paths if p.suffix.lower() in _HINTS]
        details += hints[:1]
        raise UsageError(f"no files {where}. Supported: {', '.join(_KINDS)}.{''.join(details)}")
    used = set(supported)
    ignored = tuple(str(p) for p in paths if p not in used)
    return Source(spec, tag, supported, ignored=ignored, unreadable=tuple(unreadable))


def iter_documents(
    source: Source,
    bad: BadInputLog,
    *,
    text_field: str = "text",
    lang_field: str = "lang",
    line_limit: int = LINE_LIMIT,
) -> Iterator[Document]:
    """Yield the documents of one source in a fixed order. Bad input is added to `bad`.

    text_field, lang_field: the fields or columns of a document's text and language. A record may lack a language.

    Raises UsageError for bad input if `bad.on_bad` is "refuse", and for a hub data set that cannot be read.
    """
    return _DocumentReader(bad, text_field, lang_field, line_limit).items(source)


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
        """Yield the item of a JSON value, or nothing if it is bad input. origin, group: see `Document`."""

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
        if number == 1 and raw.startswith(_BYTE_ORDER_MARK):
            del raw[: len(_BYTE_ORDER_MARK)]
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
        bad.add(BAD_JSON, origin, str(error)[:80])
    finally:
        raw.clear()
    return None


def tag_of(value: object) -> str:
    """Return the tag of a `source` or `lang` value: the part before the first colon ("wiki:Page:3" -> "wiki")."""
    if not isinstance(value, str):
        return ""
    return value.split(":", 1)[0].encode("utf-8", "replace").decode("utf-8")  # without lone surrogates


def is_binary(data: bytes) -> bool:
    """Return True if more than a tenth of the bytes are control characters that do not occur in text."""
    text_bytes = sum(len(data[i : i + CHUNK].translate(None, _CONTROL)) for i in range(0, len(data), CHUNK))
    return len(data) - text_bytes > _BINARY_SHARE * len(data)


class _DocumentReader(Reader[Document]):
    def __init__(self, bad: BadInputLog, text_field: str, lang_field: str, line_limit: int) -> None:
        super().__init__(bad, line_limit)
        self.text_field = self.long_field = text_field
        self.lang_field = lang_field

    def document(self, data: bytes, source: str, lang: str, origin: str, group: str) -> Iterator[Document]:
        """Yield the document, unless it is empty, too long or not text. `data` is UTF-8."""
        if len(data) > self.line_limit:
            self.bad.add(TOO_LONG, origin, f"{len(data):,} bytes, at most {self.line_limit:,}")
        elif not (data[:_START].decode("utf-8", "ignore").strip() or data.decode("utf-8").strip()):
            self.bad.add(EMPTY, origin)
        elif is_binary(data):
            self.bad.add(BINARY, origin)
        else:
            yield Document(data, source, lang, origin, group)

    def text(self, path: Path, source: Source) -> Iterator[Document]:
        """Yield a text file as one document, or as several parts if it is longer than the limit."""
        group = source.spec
        with path.open("rb") as file:
            if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
                file.seek(0)
            data, part = file.read(self.line_limit), 0
            if not data:
                self.bad.add(EMPTY, str(path))
            while data:
                more = file.peek(1)[:1]
                if more:
                    cut = _text_cut(data)
                    data, more = data[:cut], data[cut:]
                part += 1
                origin = str(path) if part == 1 and not file.peek(1) else f"{path} (part {part})"
                if (position := utf8_error(data)) is not None:
                    self.bad.add(NOT_UTF8, origin, _UTF16 if data[:2] in _UTF16_MARKS else f"byte {position}")
                else:
                    yield from self.document(data, source.tag, "", origin, group)
                data = more + file.read(self.line_limit - len(more))

    def record(self, record: object, tag: str, origin: str, group: str) -> Iterator[Document]:
        """Yield the document of a record. Its text must be `str`, or bytes that are known to be UTF-8."""
        if not isinstance(record, dict) or self.text_field not in record:
            keys = ", ".join(list(record)[:6]) if isinstance(record, dict) else type(record).__name__
            self.bad.add(NO_FIELD, origin, f"wanted {self.text_field!r}, has {keys}")
            return
        text = record[self.text_field]
        if isinstance(text, str):
            try:
                text = text.encode("utf-8")
            except UnicodeEncodeError:  # JSON may contain a lone surrogate, which UTF-8 cannot encode
                self.bad.add(NOT_UTF8, origin, "lone surrogate")
                return
        if not isinstance(text, bytes):
            self.bad.add(NOT_TEXT, origin, f"{self.text_field!r} is {type(text).__name__}")
            return
        source, lang = tag_of(record.get("source")) or tag, tag_of(record.get(self.lang_field))
        yield from self.document(text, source, lang, origin, group)

    def parquet(self, path: Path, tag: str) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.ParquetFile(path, buffer_size=CHUNK, pre_buffer=False)
        except (pa.ArrowInvalid, OSError) as error:
            self.bad.add(DAMAGED_FILE, str(path), str(error)[:80])
            return
        with table:
            schema, field = table.schema_arrow, self.text_field
            if field not in schema.names:
                self.bad.add(NO_COLUMN, str(path), f"wanted {field!r}, has {', '.join(schema.names[:6])}")
                return
            kind = schema.field(field).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (
                pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
            ):
                self.bad.add(NOT_TEXT, str(path), f"column {field!r} is {kind}")
                return
            columns = [field, *(c for c in ("source", self.lang_field) if c in schema.names and c != field)]
            row = 0
            try:
                for batch in table.iter_batches(batch_size=_batch_rows(table), columns=columns):
                    texts = batch.column(field)
                    if pa.types.is_dictionary(texts.type):
                        texts = texts.dictionary_decode()
                    # As bytes, so that a row with invalid UTF-8 is left out without losing the other rows.
                    texts = texts.cast(pa.large_binary())
                    tags = {c: batch.column(c).to_pylist() for c in columns[1:]}
                    for i, cell in enumerate(texts):
                        row += 1
                        origin, raw = f"{path}:{row}", cell.as_py()
                        if raw is not None and (position := utf8_error(raw)) is not None:
                            self.bad.add(NOT_UTF8, origin, f"byte {position}")
                            continue
                        record = {c: values[i] for c, values in tags.items()}
                        yield from self.record({**record, field: raw}, tag, origin, str(path))
            except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
                self.bad.add(DAMAGED_FILE, str(path), f"after row {row}: {str(error)[:80]}")


def _text_cut(data: bytes) -> int:
    """Return where to cut `data`, a part of a longer text: after its last newline, else before its last character."""
    cut = data.rfind(b"\n") + 1
    if cut == 0:
        cut = len(data) - 1
        while cut > 1 and data[cut] & 0xC0 == 0x80:
            cut -= 1
    return cut


def _batch_rows(table: pq.ParquetFile) -> int:
    """Return the number of rows to read at a time: fewer if documents are long, to limit the memory."""
    groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
    mean = max((g.total_byte_size / g.num_rows for g in groups if g.num_rows), default=1.0)
    return max(1, min(1024, int(_PARQUET_BATCH / max(1.0, mean))))


def _hub_rows(source: Source) -> Iterator[Any]:
    """Stream the rows of a hub data set. Raises UsageError if it cannot be read."""
    import datasets

    assert source.hub is not None
    name, config, split = source.hub
    try:
        yield from map(without_nulls, datasets.load_dataset(name, config, split=split, streaming=True))
    except (OSError, ValueError) as error:  # the base classes of the errors of `datasets`
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise UsageError(
            f"{source.spec}: the hub's data set cannot be read ({reason}). Check the name, config and split and the "
            "network; without a network, download its files elsewhere and give their paths instead."
        ) from error


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
