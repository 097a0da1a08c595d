"""Documents from any source: the text of files, of the records of .jsonl and parquet files, and of the hub's rows.

Input that cannot be read is reported to a `BadInputLog`, which either counts it ("skip") or raises an error that names
it ("refuse"). No document is left out without being counted.

`line_limit` limits the bytes of a line or document, and so the memory. A longer line, parquet cell or hub row is bad
input; a longer text file is read as several documents, cut at ends of lines if it has any.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deskside.data.corpus.bad_input import (
    BINARY,
    DAMAGED_FILE,
    EMPTY,
    NO_COLUMN,
    NO_FIELD,
    NOT_TEXT,
    NOT_UTF8,
    REPEATED_COLUMN,
    TOO_LONG,
    BadInputLog,
    field_hint,
    short_reason,
)
from deskside.data.corpus.lines import CHUNK, utf8_error
from deskside.data.corpus.reader import BYTE_ORDER_MARK, LINE_LIMIT, Reader, damaged_parquet, tag_of
from deskside.data.corpus.sources import Source

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF16 = "it is UTF-16; convert it with iconv -f UTF-16 -t UTF-8"
_START = 64  # bytes at the start of a document that are searched first for something other than white space
_PARQUET_BATCH = 8 << 20  # bytes of rows read at a time, by their average size
_BINARY_SHARE = 0.1  # share of control characters in binary data; text has almost none

# Control characters that do not occur in text, unlike tab, line and page breaks, backspace and escape.
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))


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
        """Yield a text file as one document, or as several parts if it is longer than the limit.

        Every line ends with a newline, as in Python's text mode and in `datasets`. In .jsonl and parquet, where line
        ends are part of a value, they stay.
        """
        group = source.spec
        with path.open("rb") as file:
            if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
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
                    yield from self.document(_with_newlines(data), source.tag, "", origin, group)
                data = more + file.read(self.line_limit - len(more))

    def record(self, record: object, tag: str, origin: str, group: str) -> Iterator[Document]:
        """Yield the document of a record. Its text must be `str`, or bytes that are known to be UTF-8."""
        if not isinstance(record, dict) or self.text_field not in record:
            if isinstance(record, dict):
                detail = field_hint(list(record), self.text_field)
            else:
                detail = f"wanted {self.text_field!r} in an object, has {type(record).__name__}"
            self.bad.add(NO_FIELD, origin, detail)
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
        # The text itself is no tag, such as that of `--field source` in a data set for translation.
        source, lang = (
            "" if name == self.text_field else tag_of(record.get(name))
            for name in ("source", self.lang_field)
        )
        yield from self.document(text, source or tag, lang, origin, group)

    def parquet(self, path: Path, tag: str) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.ParquetFile(path, buffer_size=CHUNK, pre_buffer=False, page_checksum_verification=True)
            schema, field = table.schema_arrow, self.text_field
            names = schema.names  # decodes them
        except damaged_parquet() as error:
            self.bad.add(DAMAGED_FILE, str(path), short_reason(error))
            return
        with table:
            if field not in names:
                self.bad.add(NO_COLUMN, str(path), field_hint(names, field))
                return
            if names.count(field) > 1:
                self.bad.add(REPEATED_COLUMN, str(path), repr(field))
                return
            kind = schema.field(field).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (
                pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
            ):
                self.bad.add(NOT_TEXT, str(path), f"column {field!r} is {kind}")
                return
            columns = [field, *(c for c in ("source", self.lang_field) if names.count(c) == 1 and c != field)]
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
            except damaged_parquet() as error:
                self.bad.add(DAMAGED_FILE, str(path), f"after row {row}: {short_reason(error)}")


def is_binary(data: bytes) -> bool:
    """Return True if more than a tenth of the bytes are control characters that do not occur in text."""
    text_bytes = sum(len(data[i : i + CHUNK].translate(None, _CONTROL)) for i in range(0, len(data), CHUNK))
    return len(data) - text_bytes > _BINARY_SHARE * len(data)


def _with_newlines(data: bytes) -> bytes:
    """Return a text with the line ends of Windows and of old Macs as newlines, as Python reads a text file."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


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
