"""Crash-safe file operations: a file is replaced as a whole or not at all, and a failed write raises RunError.

`os.replace` is atomic, but the kernel may write the new name to the disk before the new content. So the content is
synced first, then the file is renamed, and then the folder that contains the name is synced.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from deskside.utils.errors import RunError, UsageError

TEMPORARY_SUFFIX = ".deskside-tmp"  # unique to this program, so such files may be deleted


def cache_folder() -> Path:
    """Return the folder for files that only save time: $DESKSIDE_CACHE, or deskside in the user's cache folder."""
    if chosen := os.environ.get("DESKSIDE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deskside"


def data_folder() -> Path:
    """Return the folder for a user's additions: $DESKSIDE_DATA, or deskside in the user's data folder."""
    if chosen := os.environ.get("DESKSIDE_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "deskside"


@contextlib.contextmanager
def replace_atomically(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to. On exit it is synced and renamed to `path`; on an error it is deleted.

    Raises RunError for an OSError of the block or of the replacement.
    """
    temporary = temporary or path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
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


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file as a whole or not at all. content: the content, or a function that writes it to the open file.

    Raises RunError when it cannot be written.
    """
    with replace_atomically(path) as temporary, temporary.open("wb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a value, which has no NaN and no infinity, as JSON in UTF-8. Raises as `write_atomically`.

    Python has a lone surrogate for each byte of a file name that is not UTF-8; it becomes a JSON escape.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    write_atomically(path, f"{text}\n".encode("utf-8", "backslashreplace"))


def clear_temporary(folder: Path) -> None:
    """Delete the temporary files that a killed process has left in a folder."""
    for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line with a single write. If that fails, the file is left as it was and RunError is raised."""
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
    """Flush a file, or the names in a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(path: Path, error: OSError) -> RunError:
    """Return the RunError for a file that could not be written; if the disk is full, the message has the free space.

    It names another file if `error` does, which was read or written in the same block.
    """
    named = error.filename2 or error.filename
    if isinstance(named, str) and not _is_part_of_writing(Path(named), path):
        return RunError(f"{named}: {error.strerror or error}")
    message = f"{path}: cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            message += f" ({shutil.disk_usage(path.parent).free / 2**20:,.0f} MiB free)"
        message += "; free some space, then run the same command again: it resumes"
    return RunError(message)


def _is_part_of_writing(named: Path, path: Path) -> bool:
    """Return True for the folder of `path`, and for what has its name in there, such as a temporary file or folder."""
    folder = path.parent
    return named == folder or (
        named.is_relative_to(folder) and path.name in named.relative_to(folder).parts[0]
    )


def fingerprint(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the XXH3-128 checksum of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return path.stat().st_size, digest.hexdigest()


# Folders that a command is told to write to


def check_folder(path: Path, option: str = "--out") -> None:
    """Raise UsageError if `path`, the value of an option, cannot be a folder because it or one above it is a file."""
    # os.path answers False where Path.exists raises PermissionError.
    if any(os.path.exists(above) and not os.path.isdir(above) for above in (path, *path.parents)):
        raise UsageError(f"{option} {path}: is a file, or lies below one; give a folder")


def create_folder(path: Path, option: str = "--out") -> None:
    """Create a folder, the value of an option, if it does not exist.

    Raises UsageError if there can be no such folder, and RunError if the disk is full.
    """
    check_folder(path, option)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise write_error(path, error) from None
        reason = f"{error.filename or path}: {error.strerror or error}"
        raise UsageError(f"{option} {path}: cannot be created ({reason}); give another folder") from None


@contextlib.contextmanager
def locked_folder(path: Path, option: str = "--out") -> Iterator[None]:
    """Context manager that locks a folder, without a file in it. Raises UsageError if another process holds the lock.

    The lock ends with the process, and follows the folder if it is renamed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{option} {path}: another process writes to it; wait for it, or stop it first"
            ) from None
        except OSError:  # a file system without locks of folders
            pass
        yield
    finally:
        os.close(descriptor)


# Replacing folders that this program wrote, without deleting files that it did not write


def unowned_files(folder: Path, owned: Collection[str]) -> list[str]:
    """Return the sorted names in `folder` that are not plain files listed in `owned`; [] if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in owned or not entry.is_file())


def check_replaceable(out: Path) -> None:
    """Raise UsageError if `out` is a mount point, or is or contains the working directory."""
    target = out.resolve()
    if target.is_mount():
        raise UsageError(f"--out {out}: is a mount point, and so cannot be replaced. Give another directory.")
    if Path.cwd().is_relative_to(target):
        raise UsageError(
            f"--out {out}: is or contains the current directory, and so cannot be replaced. Give another directory."
        )


def replace_folder(target: Path, new: Path, owned: Collection[str]) -> None:
    """Rename `new`, a folder next to `target`, to `target`, and delete the files of the old folder listed in `owned`.

    The old folder keeps all its files until `new` has taken its place, and files that are not listed are never deleted.
    Neither path may be a symbolic link. Raises OSError if a folder cannot be renamed, and RunError if the old folder
    has got other files since `unowned_files` was called; the message says where they are.
    """
    if not target.exists():
        os.rename(new, target)
        return
    old = new.with_name(f"{new.name}.old")
    os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(old, target)
        raise
    delete_files(old, owned)
    try:
        old.rmdir()
    except OSError:
        raise RunError(f"{target}: was replaced; its other files are now in {old}") from None


def delete_files(folder: Path, names: Collection[str]) -> None:
    """Delete these files of a folder, where they exist."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
