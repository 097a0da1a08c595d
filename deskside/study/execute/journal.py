"""journal.jsonl: when each trial started and how it ended, one line per event, append-only.

`--resume` replays it: a trial that started and did not end was running when the study was killed. A kill leaves at
most one half-written last line, which is cut off when the journal is opened again.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deskside.study.results import STATUSES
from deskside.utils import strict_json
from deskside.utils.errors import RunError
from deskside.utils.files import append_line
from deskside.utils.parsing import json_value

FILE = "journal.jsonl"
# A trial with one of these statuses is done; --resume runs the others.
FINAL = tuple(status for status in STATUSES if status not in ("running", "pending"))
Key = tuple[str, int]  # arm, seed


@dataclass(frozen=True)
class TrialHistory:
    """The history of a trial.

    status: "running" if it started and did not end. seconds: total lifetime of its processes since it last started
    without a checkpoint, None if the end of one of them was not recorded.
    """

    status: str = "pending"
    reason: str = ""
    attempts: int = 0
    device: str = ""
    started: str = ""
    ended: str = ""
    seconds: float | None = 0.0


def apply_event(before: TrialHistory, event: Mapping[str, Any]) -> TrialHistory:
    """Apply an event to a trial's history. Raises KeyError, TypeError or ValueError if it is invalid."""
    spent = before.seconds
    if event["event"] == "started":
        if not event["resumed"]:
            spent = 0.0
        elif before.status == "running":
            spent = None  # the end of the previous process was not recorded
        attempts, device, time = before.attempts + 1, str(event["device"]), str(event["time"])
        return TrialHistory("running", "", attempts, device, time, "", spent)
    if event["event"] != "ended" or event["status"] not in STATUSES:
        raise KeyError(f"{event['event']} {event.get('status', '')}")
    lasted = event["seconds"]
    spent = None if spent is None or lasted is None else spent + float(lasted)
    status, reason, time = str(event["status"]), str(event["reason"]), str(event["time"])
    return replace(before, status=status, reason=reason, ended=time, seconds=spent)


class StudyJournal:
    """The journal of one study. Raises RunError for a damaged line, and when it cannot be written."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.histories = replay_file(self.path)
        if self.path.exists():  # drop a half-written last line
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)

    def started(self, arm: str, seed: int, device: str, pid: int, resumed: bool) -> None:
        """Record the start of a trial's process. resumed: it continues from a checkpoint."""
        self._append(arm, seed, "started", device=device, pid=pid, resumed=resumed)

    def ended(self, arm: str, seed: int, status: str, reason: str, seconds: float | None) -> None:
        """Record the end of a trial's process. seconds: its lifetime, None if its end was not seen."""
        self._append(arm, seed, "ended", status=status, reason=reason, seconds=seconds)

    def of(self, arm: str, seed: int) -> TrialHistory:
        """Return the history of a trial."""
        return self.histories.get((arm, seed), TrialHistory())

    def _append(self, arm: str, seed: int, event: str, **more: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"time": time, "arm": arm, "seed": seed, "event": event, **more}
        append_line(self.path, strict_json.dumps(entry))
        self.histories[arm, seed] = apply_event(self.of(arm, seed), entry)


def replay_file(path: Path) -> dict[Key, TrialHistory]:
    """Return the history of every trial, from the complete lines of a journal.

    Raises RunError naming a damaged line.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    histories: dict[Key, TrialHistory] = {}
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            event = json_value(line)
            key = (str(event["arm"]), int(event["seed"]))
            histories[key] = apply_event(histories.get(key, TrialHistory()), event)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}: line {number} is damaged ({error}); delete that line") from None
    return histories
