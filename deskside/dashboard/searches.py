"""Reads searches (`deskside search`)."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deskside.run.record import number, read_object, text
from deskside.study.liveness import RECENT_SECONDS, held_locks, is_held
from deskside.study.results import INTERRUPTED
from deskside.utils.errors import RunError

if TYPE_CHECKING:
    from deskside.study.search.outcome import Outcome


@dataclass(frozen=True)
class Search:
    """A search's directory with its `outcome`, or None and the `problem` why it could not be read.

    Attributes:
        created: ISO time of the start.
        status: "finished", "running" or "interrupted".
        spent_seconds: On the clock.
    """

    path: Path
    outcome: "Outcome | None"
    problem: str
    created: str = ""
    status: str = INTERRUPTED
    spent_seconds: float = 0.0

    @property
    def share_spent(self) -> float:
        """Share of its hours that is over, 0 to 1."""
        seconds = 3600 * self.outcome.hours if self.outcome is not None else 0.0
        return min(1.0, max(0.0, self.spent_seconds / seconds)) if seconds > 0 else 1.0


def read_search(path: Path) -> Search:
    """Read a search. Its status is that of `with_status`."""
    # Imported here, because that takes a fifth of a second, and most directories have no search.
    from deskside.study.search.outcome import read_outcome

    plan, problem = read_object(path / "search.json")
    try:
        outcome = read_outcome(path)
    except RunError as error:
        return Search(path, None, str(error).removeprefix(f"{path}: "))
    return Search(path, outcome, problem, text(plan.get("created")), spent_seconds=outcome.spent_seconds)


def with_status(search: Search) -> Search:
    """Return a search with its status and its time, which change without a change of its result."""
    outcome = search.outcome
    if outcome is None:
        return search
    if outcome.complete:
        return replace(search, status="finished")
    spent, _ = read_object(search.path / "spent.json")
    seconds = number(spent.get("seconds"))
    status = "running" if _is_live(search.path) else INTERRUPTED
    return replace(search, status=status, spent_seconds=outcome.spent_seconds if seconds is None else seconds)


def _is_live(path: Path) -> bool:
    """Return True if one of the search's two studies runs, or the search wrote in the last two minutes."""
    locks = held_locks()
    if any(is_held(path / name, locks) for name in ("trials", "confirm")):
        return True
    times = [0.0]
    for name in ("spent.json", "result.json"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return time.time() - max(times) < RECENT_SECONDS
