"""Crash-safe files: replaced as a whole or not at all, with one error message for a disk that refuses.

`os.replace` is atomic, but the kernel may write the new name to the disk before the new content. So the content is
synced first, then the file is renamed, then the folder, which holds the name, is synced.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from deskside.utils.errors import RunError


@contextlib.contextmanager
def replace_atomically(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to. On exit it is synced and renamed to `path`; on an error it is deleted.

    Raises RunError for an OSError of the block or of the replacement.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the folder may be read-only or gone
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file as a whole or not at all. Raises RunError when it cannot be written."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def append_line(path: Path, line: str) -> None:
    """Append one line in one write. Raises RunError, and leaves the file as it was, when it cannot be written."""
    try:
        with path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            data = (line + "\n").encode()
            if file.write(data) != len(data):
                file.truncate(start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise write_error(path, error) from None


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> RunError:
    """Return the error for a file that could not be written; for a full disk it has the free space."""
    message = f"{path}: cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            message += f" ({shutil.disk_usage(path.parent).free / 2**20:,.0f} MiB free)"
        message += "; free some space, then run the same command again: it resumes"
    return RunError(message)


def fingerprint(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the XXH3-128 checksum of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return path.stat().st_size, digest.hexdigest()
