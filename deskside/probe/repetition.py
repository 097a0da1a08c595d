"""The progress of `deskside probe --again`, so that the same command continues it after an interruption.

The store does not show it, because it has a row for each of the points from the start. A file beside it lists the
points of the command and those that are measured. It is deleted when all have been.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deskside.measurements.store import FINAL, Row, Store, slug
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_error, write_json
from deskside.utils.parsing import read_json_object


@dataclass
class Repetition:
    """The points of a repeated sweep and those that are measured, both as hashes of their keys."""

    path: Path
    points: list[str]
    measured: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, store: Store, card: str, hashes: Iterable[str]) -> "Repetition":
        """Return the unfinished repetition of the same points, or a new one if there is none.

        The caller holds the lock of the card.
        """
        repetition = cls(store.folder / f".{slug(card)}.again.json", sorted(set(hashes)))
        try:
            saved = read_json_object(repetition.path)
        except (UsageError, RunError):  # missing or damaged: everything is measured again
            return repetition
        measured = saved.get("measured")
        if saved.get("points") == repetition.points and isinstance(measured, list):
            repetition.measured = set(repetition.points) & {
                name for name in measured if isinstance(name, str)
            }
        return repetition

    def add(self, row: Row) -> None:
        """Record that a row was measured, unless it must be measured again in any case. Raises RunError."""
        if row["status"] in FINAL:
            self.measured.add(row["hash"])
            write_json(self.path, {"points": self.points, "measured": sorted(self.measured)})

    def finish(self) -> None:
        """Delete the file, so that the next repetition measures everything. Raises RunError."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(self.path, error) from None
