"""Replacing a folder that this program wrote earlier, without deleting a file that it did not write.

The new folder is made whole under another name beside the old one and then takes its name, so a failure at any moment
leaves the old one as it was. Of the old folder only files that are known as our own are deleted.
"""

import os
from collections.abc import Collection
from pathlib import Path

from deskside.utils.errors import RunError, UsageError


def strangers(folder: Path, own: Collection[str]) -> list[str]:
    """What `folder` holds beside the plain files named in `own`, sorted; nothing where there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in own or not entry.is_file())


def refuse_fixed(out: Path) -> None:
    """Raises UsageError for a folder that cannot be renamed, or from which somebody would be left behind."""
    target = out.resolve()
    for fixed, what in (
        (target.is_mount(), "a mount point"),
        (Path.cwd().is_relative_to(target), "where you are"),
    ):
        if fixed:
            raise UsageError(f"--out {out}: is {what}, and so cannot be replaced. Give another directory.")


def replace(target: Path, new: Path, own: Collection[str]) -> None:
    """`new`, a folder beside `target`, takes its name. Files of the old `target` that are named in `own` are deleted.

    Neither path may be a symbolic link. Raises OSError when a folder cannot be renamed, and RunError when the old one
    got other files since `strangers` looked: they are kept, and the error says where.
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
    """Delete the files named in `own`."""
    for name in own:
        (folder / name).unlink(missing_ok=True)
