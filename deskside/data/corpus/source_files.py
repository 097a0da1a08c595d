"""Records of the files that data was made from, by which a repeated command notices that one has changed.

A file whose size and both times are those of its record is not read: the kernel sets the time of change whenever the
content or an attribute changes, and no program can choose it. Otherwise the checksum of the content decides, so a copy
or a touch is not a change, but another text is, even with the same size and time of modification. A data set of the hub
has no files; only its name is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from deskside.config.base import Part
from deskside.data.corpus.sources import Source
from deskside.utils.errors import UsageError
from deskside.utils.files import fingerprint
from deskside.utils.format import printable
from deskside.utils.progress import ProgressBar

_LARGE = 1e9  # from this many bytes on, reading shows its progress


class FileRecord(Part):
    """A file of a source. size: -1 if it cannot be read. times: of its modification and of its change, in nanoseconds.

    checksum: of its content, as `fingerprint`; "" if it cannot be read.
    """

    name: str
    size: int
    times: tuple[int, int]
    checksum: str


def record_files(
    sources: Iterable[Source], known: Sequence[FileRecord] = (), *, quiet: bool = False
) -> list[FileRecord]:
    """Return the records of the files of all sources, in their order.

    known: earlier records, whose checksums are used for the files that have not changed since.
    """
    paths = [path for source in sources for path in source.paths]
    records = [_without_checksum(path) for path in paths]
    to_read: list[int] = []
    for i, (now, before) in enumerate(itertools.zip_longest(records, known[: len(records)])):
        if before is not None and before.checksum and before == _with_checksum(now, before.checksum):
            records[i] = before
        elif now.size >= 0:
            to_read.append(i)
    total = sum(records[i].size for i in to_read)
    with ProgressBar("checksum", total / 1e6, "MB", quiet=quiet or total < _LARGE) as bar:
        for i in to_read:
            try:
                records[i] = _with_checksum(records[i], fingerprint(paths[i])[1])
            except OSError:
                continue  # reading it as a source reports it
            bar.advance(records[i].size / 1e6)
    return records


def first_change(before: Sequence[FileRecord], now: Sequence[FileRecord]) -> str:
    """Return the name of the first file whose content differs, or ""."""
    for old, new in itertools.zip_longest(before, now):
        if old is None or new is None or (old.size, old.checksum) != (new.size, new.checksum):
            return str((new or old).name)
    return ""


def sources_changed(out: Path, what: str = "the text of the sources") -> UsageError:
    """Return the error for sources that are not those of the data in `out`. what: the changed thing."""
    return UsageError(
        f"--out {out}: {what} has changed since this data was begun. Give another --out, or --no-resume to replace it."
    )


def _without_checksum(path: Path) -> FileRecord:
    name = printable(path.name)  # can be written to JSON and printed
    try:
        status = path.stat()
    except OSError:
        return FileRecord(name=name, size=-1, times=(0, 0), checksum="")
    times = status.st_mtime_ns, status.st_ctime_ns
    return FileRecord(name=name, size=status.st_size, times=times, checksum="")


def _with_checksum(record: FileRecord, checksum: str) -> FileRecord:
    return record.model_copy(update={"checksum": checksum})
