"""Something that follows a run from above, as `deskside go` does.

It sees each step's row, may ask for a stop at the next step boundary, has counted time before this process, and keeps
some of the run's length for what it does after the run's own end. This one follows nothing.
"""

from typing import Any

from deskside.run.directory import RunDirectory
from deskside.train.loop.stop import StopSignal
from deskside.train.objective import RowDataset
from deskside.train.prepare.time_budget import REPORT_SECONDS, REPORT_SHARE


class Callback:
    """The base of what follows a run. Only the process with rank 0 has rows to see.

    spent: wall-clock seconds that this run took in earlier processes, lost steps included. go_on: the command that
    continues the run, for the line that says so; None: the objective's own.
    """

    spent = 0.0
    go_on: str | None = None

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        """Steps are about to begin; `stop.requested` may be set from now on."""

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        """One step's row, as it stands in metrics.jsonl."""

    def close(self) -> None:
        """The steps have ended, for whatever reason."""

    def reserve(self, limit: float | None) -> float:
        """Return the seconds to keep for what follows the run's own end. limit: the run's, in wall-clock seconds."""
        return 0.0

    def outcome(self, summary: dict[str, Any]) -> dict[str, Any]:
        """What is added to summary.json."""
        return {}


class ReportFollows(Callback):
    """A run whose command writes the report when the run has ended, within the same limit."""

    def reserve(self, limit: float | None) -> float:
        return 0.0 if limit is None else min(REPORT_SECONDS, REPORT_SHARE * limit)
