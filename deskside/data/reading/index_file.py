"""The name of a prepared data set's index, for modules that only ask whether there is one: imports nothing large."""

from pathlib import Path

INDEX = "index.json"


def is_prepared(folder: str | Path) -> bool:
    """Return True if a folder has an index, which is written last, so its data is complete."""
    return (Path(folder) / INDEX).is_file()
