"""Replacement of a folder that this program wrote, without deleting files that it did not write.

The new folder is completed beside the old one and then renamed, so a failure at any moment leaves the old one
intact. Only known files of the old folder are deleted.
"""

import os
from collections.abc import Collection
from pathlib import Path

from deskside.utils.errors import RunError, UsageError


def unowned_files(folder: Path, own: Collection[str]) -> list[str]:
    """Return the sorted names in `folder` that are not plain files listed in `own`; none if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in own or not entry.is_file())


def refuse_fixed(out: Path) -> None:
    """Raise UsageError for a folder that cannot be renamed, or that is some process's working directory."""
    target = out.resolve()
    for fixed, what in (
        (target.is_mount(), "a mount point"),
        (Path.cwd().is_relative_to(target), "where you are"),
    ):
        if fixed:
            raise UsageError(f"--out {out}: is {what}, and so cannot be replaced. Give another directory.")


def replace(target: Path, new: Path, own: Collection[str]) -> None:
    """Rename `new`, a folder beside `target`, to `target`. Files of the old `target` that are listed in `own` are
    deleted.

    Neither path may be a symbolic link. Raises OSError if a folder cannot be renamed, and RunError if the old one
    got other files since `unowned_files` was called; they are kept, and the message says where.
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
    delete(old, own)
    try:
        old.rmdir()
    except OSError:
        raise RunError(f"{target}: was replaced; what else it held by then is kept in {old}") from None


def delete(folder: Path, own: Collection[str]) -> None:
    """Delete the files listed in `own`."""
    for name in own:
        (folder / name).unlink(missing_ok=True)
