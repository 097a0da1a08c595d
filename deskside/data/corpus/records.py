"""Records with several fields, such as conversations and preference pairs, from the same kinds of sources as text.

A record is a dict of the requested fields as in JSON (parquet's lists and structs become lists and dicts), with the
tags and the origin of a `sources.Document`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from deskside.data.corpus.sources import (
    MISSING,
    NO_COLUMN,
    NO_FIELD,
    TEXT_KINDS,
    TRUNCATED,
    BadInputLog,
    Source,
    iter_hub_rows,
    iter_json,
    kind_of,
    tag_of,
)
from deskside.utils.errors import UsageError


@dataclass(slots=True)
class Record:
    """One record. fields: every required field, and the optional ones that are present. source, lang: tags, or "".
    origin: file:line.
    """

    fields: dict[str, Any]
    source: str
    lang: str
    origin: str


def iter_records(
    source: Source, fields: Sequence[str], bad: BadInputLog, optional: Sequence[str] = ()
) -> Iterator[Record]:
    """Yield the records of one source in a fixed order; unreadable records and missing fields go to `bad`.

    optional: further fields that a record may have. Raises UsageError if the source is plain text, or a hub data
    set that cannot be reached, or as `bad` does.
    """
    if source.hub is not None:
        yield from _hub(source, fields, bad, optional)
        return
    for place, reason in source.unreadable:
        bad.add(MISSING, place, reason)
    for path in source.paths:
        kind = kind_of(path)
        if kind in TEXT_KINDS:
            raise UsageError(f"{path}: is plain text; records with {fields[0]!r} come as .jsonl or .parquet.")
        try:
            yield from (_parquet if kind == ".parquet" else _jsonl)(path, source.tag, fields, bad, optional)
        except OSError as error:  # missing, forbidden, a folder, a loop of links, an unreadable disk
            bad.add(MISSING, str(path), error.strerror or str(error))


def content_key(sources: Sequence[Source]) -> str:
    """Return a checksum of the sources' content, independent of their location; for a hub data set only of its
    name.
    """
    digest = xxhash.xxh3_128()
    for source in sources:
        digest.update(
            f"{source.tag}\n{source.spec if source.hub is not None else len(source.paths)}\n".encode()
        )
        for path in source.paths:
            digest.update((kind_of(path) or "").encode())
            if path.is_file():
                with path.open("rb") as file:
                    while chunk := file.read(1 << 22):
                        digest.update(chunk)
    return digest.hexdigest()


def _jsonl(
    path: Path, tag: str, fields: Sequence[str], bad: BadInputLog, optional: Sequence[str]
) -> Iterator[Record]:
    for origin, record in iter_json(path, bad):
        yield from _record(record, tag, origin, fields, bad, optional)


def _parquet(
    path: Path, tag: str, fields: Sequence[str], bad: BadInputLog, optional: Sequence[str]
) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise FileNotFoundError(2, "No such file", str(path))
    row = 0
    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if missing := [name for name in fields if name not in names]:
                bad.add(NO_COLUMN, str(path), f"wanted {missing[0]!r}, has {', '.join(names[:6])}")
                return
            besides = ("source", "lang", *optional)
            columns = [*fields, *(c for c in besides if c in names and c not in fields)]
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield from _record(record, tag, f"{path}:{row}", fields, bad, optional)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        if isinstance(error, (FileNotFoundError, PermissionError)):
            raise
        bad.add(TRUNCATED, str(path), f"after row {row}: {str(error)[:80]}")


def _hub(
    source: Source, fields: Sequence[str], bad: BadInputLog, optional: Sequence[str]
) -> Iterator[Record]:
    for row, record in enumerate(iter_hub_rows(source), start=1):
        yield from _record(record, source.tag, f"{source.spec}:{row}", fields, bad, optional)


def _record(
    record: object,
    tag: str,
    origin: str,
    fields: Sequence[str],
    bad: BadInputLog,
    optional: Sequence[str],
) -> Iterator[Record]:
    if not isinstance(record, Mapping) or any(name not in record for name in fields):
        keys = ", ".join(map(str, list(record)[:6])) if isinstance(record, Mapping) else type(record).__name__
        bad.add(NO_FIELD, origin, f"wanted {', '.join(fields)}, has {keys}")
        return
    wanted = {name: record[name] for name in (*fields, *(o for o in optional if o in record))}
    yield Record(wanted, tag_of(record.get("source")) or tag, tag_of(record.get("lang")), origin)
