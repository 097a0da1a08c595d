"""The journal of a study, journal.jsonl: an append-only file with one line for each start and end of a trial.

`--resume` replays it: a trial that started and did not end was running when the study was killed. A kill leaves at
most one half-written last line, which is removed when the journal is opened again.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deskside.study.results import STATUSES, Status
from deskside.utils import strict_json
from deskside.utils.errors import RunError
from deskside.utils.files import append_line
from deskside.utils.parsing import json_value

FILE = "journal.jsonl"
# Statuses of trials that have ended; --resume runs the others.
FINAL = tuple(status for status in STATUSES if status not in ("running", "pending"))
Key = tuple[str, int]  # arm, seed


@dataclass(frozen=True)
class TrialHistory:
    """The history of a trial.

    Attributes:
        status: Status of the last end; "running" if the trial started and did not end.
        attempts: Number of starts.
        started, ended: Times of the last start and end in ISO format, or "".
        seconds: Total lifetime of the trial's processes since it last started from scratch; None if the end of one of
            them was not recorded.
    """

    status: Status = "pending"
    reason: str = ""
    attempts: int = 0
    device: str = ""
    started: str = ""
    ended: str = ""
    seconds: float | None = 0.0


def apply_event(history: TrialHistory, event: Mapping[str, Any]) -> TrialHistory:
    """Return the history after an event. Raises KeyError, TypeError or ValueError if the event is invalid."""
    seconds = history.seconds
    if event["event"] == "started":
        if not event["resumed"]:
            seconds = 0.0
        elif history.status == "running":
            seconds = None  # the end of the previous process was not recorded
        attempts, device, time = history.attempts + 1, str(event["device"]), str(event["time"])
        return TrialHistory("running", "", attempts, device, time, "", seconds)
    if event["event"] != "ended" or event["status"] not in STATUSES:
        raise KeyError(f"{event['event']} {event.get('status', '')}")
    lifetime = event["seconds"]
    seconds = None if seconds is None or lifetime is None else seconds + float(lifetime)
    reason, time = str(event["reason"]), str(event["time"])
    return replace(history, status=event["status"], reason=reason, ended=time, seconds=seconds)


class StudyJournal:
    """The journal of one study. Raises RunError if a line is damaged or the file cannot be written."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.histories = replay_file(self.path)
        if self.path.exists():  # remove a half-written last line
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)

    def started(self, arm: str, seed: int, device: str, pid: int | None, resumed: bool) -> None:
        """Record the start of a trial's process.

        pid: None on another machine; resumed: True if it continues from a checkpoint.
        """
        self._append(arm, seed, "started", device=device, pid=pid, resumed=resumed)

    def ended(self, arm: str, seed: int, status: str, reason: str, seconds: float | None) -> None:
        """Record the end of a trial's process. seconds: its lifetime; None if the study did not see it end."""
        self._append(arm, seed, "ended", status=status, reason=reason, seconds=seconds)

    def history(self, arm: str, seed: int) -> TrialHistory:
        """Return the history of a trial. arm: the arm's id."""
        return self.histories.get((arm, seed), TrialHistory())

    def _append(self, arm: str, seed: int, event: str, **fields: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"time": time, "arm": arm, "seed": seed, "event": event, **fields}
        append_line(self.path, strict_json.dumps(entry))
        self.histories[arm, seed] = apply_event(self.history(arm, seed), entry)


def replay_file(path: Path) -> dict[Key, TrialHistory]:
    """Return the history of every trial, from the complete lines of a journal. Raises RunError for a damaged line."""
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
