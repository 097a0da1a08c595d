"""Files of the repository, for tests that read them. An empty list would let such a test pass without a check."""

from pathlib import Path

import deskside

PACKAGE = Path(deskside.__file__).parent
ROOT = PACKAGE.parent


def files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match, sorted. Fails if there are none."""
    found = sorted(path for path in folder.rglob(pattern) if path.is_file())
    assert found, f"{folder}: no {pattern}"
    return found
