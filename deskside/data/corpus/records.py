"""Records with several fields, such as conversations and preference pairs, from any source but plain text.

The values are as in JSON: parquet's lists and structs become lists and dicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from deskside.data.corpus.bad_input import (
    DAMAGED_FILE,
    NO_COLUMN,
    NO_FIELD,
    REPEATED_COLUMN,
    BadInputLog,
    short_reason,
)
from deskside.data.corpus.reader import Reader, damaged_parquet, tag_of, without_nulls
from deskside.data.corpus.sources import Source, kind_of
from deskside.utils.errors import UsageError


@dataclass(slots=True)
class Record:
    """One record. fields: the required fields, and the optional ones that are present. source, lang: tags, or "".

    origin: where it was read, such as file:line.
    """

    fields: dict[str, Any]
    source: str
    lang: str
    origin: str


def iter_records(
    source: Source, fields: Sequence[str], bad: BadInputLog, optional: Sequence[str] = ()
) -> Iterator[Record]:
    """Yield the records of one source in a fixed order. Unreadable records and missing fields are added to `bad`.

    optional: further fields that a record may have. If `fields` is empty, it needs at least one of these. Raises
    UsageError if the source is plain text or a hub data set that cannot be read, and for bad input if `bad.on_bad` is
    "refuse".
    """
    return _RecordReader(bad, fields, optional).items(source)


def sources_checksum(sources: Sequence[Source]) -> str:
    """Return a checksum of the content and the tags of sources, which does not depend on their location.

    For a hub data set, only its spec is included.
    """
    digest = xxhash.xxh3_128()
    for source in sources:
        identity = source.spec if source.hub is not None else len(source.paths)
        digest.update(f"{source.tag}\n{identity}\n".encode())
        for path in source.paths:
            digest.update((kind_of(path) or "").encode())
            if path.is_file():
                with path.open("rb") as file:
                    while chunk := file.read(1 << 22):
                        digest.update(chunk)
    return digest.hexdigest()


class _RecordReader(Reader[Record]):
    def __init__(self, bad: BadInputLog, fields: Sequence[str], optional: Sequence[str]) -> None:
        super().__init__(bad)
        self.fields, self.optional = fields, optional
        self.wanted = fields or optional

    def text(self, path: Path, source: Source) -> Iterator[Record]:
        raise UsageError(
            f"{path}: is plain text; records with {self.wanted[0]!r} must be in .jsonl or .parquet files."
        )

    def parquet(self, path: Path, tag: str) -> Iterator[Record]:
        import pyarrow.parquet as pq

        row = 0
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as table:
                names = table.schema_arrow.names
                if missing := [name for name in self.fields if name not in names]:
                    self.bad.add(NO_COLUMN, str(path), f"wanted {missing[0]!r}, has {', '.join(names[:6])}")
                    return
                if repeated := [name for name in (*self.wanted, *self.optional) if names.count(name) > 1]:
                    self.bad.add(REPEATED_COLUMN, str(path), repr(repeated[0]))
                    return
                others = (*(tag for tag in ("source", "lang") if names.count(tag) == 1), *self.optional)
                columns = [*self.fields, *(c for c in others if c in names and c not in self.fields)]
                if not any(name in columns for name in self.wanted):
                    self.bad.add(
                        NO_COLUMN, str(path), f"wanted {self.wanted[0]!r}, has {', '.join(names[:6])}"
                    )
                    return
                for batch in table.iter_batches(batch_size=256, columns=columns):
                    for record in batch.to_pylist():
                        row += 1
                        yield from self.record(without_nulls(record), tag, f"{path}:{row}", str(path))
        except damaged_parquet() as error:
            if isinstance(error, (FileNotFoundError, PermissionError)):
                raise
            self.bad.add(DAMAGED_FILE, str(path), f"after row {row}: {short_reason(error)}")

    def record(self, record: object, tag: str, origin: str, group: str) -> Iterator[Record]:
        found = record if isinstance(record, Mapping) else {}
        if any(name not in found for name in self.fields) or not any(name in found for name in self.wanted):
            if isinstance(record, Mapping):
                keys = ", ".join(map(str, list(record)[:6]))
            else:
                keys = type(record).__name__
            wanted = ", ".join(self.fields) or f"one of {', '.join(self.optional)}"
            self.bad.add(NO_FIELD, origin, f"wanted {wanted}, has {keys}")
            return
        fields = {name: found[name] for name in self.fields}
        fields |= {name: found[name] for name in self.optional if name in found}
        yield Record(fields, tag_of(found.get("source")) or tag, tag_of(found.get("lang")), origin)
